"""Models: their cache, several of them, and GPUs."""

import json

import pytest

from tests.deployment.helm.chart import (
    ABOUT,
    ROOT,
    VALUES,
    Object,
    ci,
    component_of,
    containers,
    deployments,
    main_container,
    merged,
    of_kind,
    only,
    parse,
    pods,
    render,
    render_ci,
    settings_of,
    variables,
    volumes,
)


def test_the_model_cache_is_the_folder_of_the_image() -> None:
    assert "QUIRE_CACHE=/var/cache/quire" in (ROOT / "Dockerfile").read_text()


def test_without_persistence_each_engine_has_a_separate_model_cache() -> None:
    own = {"name": "model-cache", "emptyDir": {"sizeLimit": VALUES["modelCache"]["size"]}}
    found = {name: volumes(pod).get("/var/cache/quire") for name, pod in pods(render()).items()}
    assert found == {"kvmanager": None, "engine": own, "gateway": None}


def claims_of_engines(objects: list[Object]) -> set[str]:
    engines = [pod for pod in pods(objects).values() if component_of(pod) == "engine"]
    return {volumes(pod)["/var/cache/quire"]["persistentVolumeClaim"]["claimName"] for pod in engines}


@pytest.mark.parametrize(("name", "size"), [("gpu", "50Gi"), ("models", "20Gi")])
def test_a_claim_is_shared_by_all_engines_on_several_nodes(name: str, size: str) -> None:
    claim = only(render_ci(name), "PersistentVolumeClaim")
    assert claims_of_engines(render_ci(name)) == {claim["metadata"]["name"]}
    assert claim["spec"] == {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}}


def test_an_existing_claim_is_used_instead_of_a_new_one() -> None:
    objects = render_ci("restricted")
    assert claims_of_engines(objects) == {"models"}
    assert of_kind(objects, "PersistentVolumeClaim") == []


@pytest.mark.parametrize(
    ("values", "tag"),
    [
        ({}, "{release}"),
        ({"engine": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}, "{release}-cuda"),
        ({"engine": {"settings": {"device": "cuda"}, "resources": {"claims": [{"name": "gpu"}]}}}, "{release}-cuda"),
        (
            {"models": [{"name": "a", "model": "a/b", "resources": {"limits": {"nvidia.com/gpu": 1}}}]},
            "{release}-cuda",
        ),
        ({"engine": {"resources": {"limits": {"nvidia.com/gpu": 1}}}, "image": {"tag": "1"}}, "1"),
    ],
)
def test_an_engine_with_a_gpu_has_an_image_with_cuda_unless_a_tag_is_given(values: Object, tag: str) -> None:
    images = {container["image"] for container in containers(render(values)).values()}
    assert images == {f"quire:{tag.format(release=ABOUT['appVersion'])}"}


def test_only_the_engine_requests_a_gpu_and_a_gpu_node() -> None:
    gpu = render_ci("gpu")
    requests = {name: container.get("resources") for name, container in containers(gpu).items()}
    assert requests["engine"] == {"limits": {"nvidia.com/gpu": 1}}
    assert "nvidia" not in f"{requests['kvmanager']} {requests['gateway']}"
    spec = pods(gpu)["engine"]["spec"]
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    for name in ("kvmanager", "gateway"):
        assert not pods(gpu)[name]["spec"].keys() & {"runtimeClassName", "nodeSelector"}
        assert "nvidia" not in json.dumps(pods(gpu)[name])


@pytest.mark.parametrize(("name", "size"), [("default", "1Gi"), ("gpu", "8Gi")])
def test_the_engine_has_shared_memory(name: str, size: str) -> None:
    found = {name: volumes(pod).get("/dev/shm") for name, pod in pods(render_ci(name)).items()}
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    assert found == {"kvmanager": None, "engine": shm, "gateway": None}


# Several models


def test_each_of_several_models_has_its_own_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render_ci("models")
    assert sorted(deployments(objects)) == ["engine-large", "engine-small", "gateway", "kvmanager"]
    large, small = (settings_of(pods(objects)[f"engine-{name}"], monkeypatch) for name in ("large", "small"))
    assert (large.model, large.device, large.cache_mib, large.served_name()) == (
        *("Qwen/Qwen2.5-7B-Instruct", "cuda", 40960),
        "Qwen2.5-7B-Instruct",
    )
    assert (small.model, small.device, small.served_name()) == (
        *("HuggingFaceTB/SmolLM2-135M-Instruct", "auto"),
        "small",
    )
    assert (large.token_budget, small.token_budget) == (1024, 1024), "said of all engines"
    assert (large.grace_seconds, small.grace_seconds) == (25, 0), "zero is a value too"
    assert deployments(objects)["engine-large"]["spec"]["replicas"] == 2
    assert "resources" not in main_container(pods(objects)["engine-small"])


def test_values_of_one_model_do_not_change_another() -> None:
    models = ci("models")
    before = render(models)
    models["models"][0] = merged(models["models"][0], {"podLabels": {"a": "b"}, "resources": {"limits": {"cpu": 1}}})
    after = render(models)
    changed = [item["metadata"]["name"] for item, was in zip(after, before, strict=True) if item != was]
    assert changed == ["blue-quire-engine-large"]
    assert main_container(pods(after)["engine-large"])["resources"]["limits"] == {"cpu": 1, "nvidia.com/gpu": 1}


def test_helm_test_generates_with_every_model_by_its_served_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = only(render_ci("models"), "Pod")
    parsed = [parse(container["args"], variables(container), monkeypatch) for container in pod["spec"]["containers"]]
    assert [(name, options.get("model")) for name, options in parsed] == [
        ("health", None),
        ("generate", "Qwen2.5-7B-Instruct"),
        ("generate", "small"),
    ]
