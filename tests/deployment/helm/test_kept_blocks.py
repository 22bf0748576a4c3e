"""Memory of a pod in which an engine's blocks outlive its container."""

from typing import Any

import pytest

from services.engine.settings import EngineSettings
from tests.deployment.helm.chart import (
    Object,
    all_pods,
    main_container,
    merged,
    nested,
    pod_of,
    pods,
    refusal,
    render,
    settings_of,
    volumes,
)

KEPT = nested("engine.keepBlocks.enabled", True)
FOLDER = "/var/lib/quire/kept-blocks"
A_GPU = nested("engine.resources.limits", {"nvidia.com/gpu": 1})


def kept(settings: Object | None = None, **values: Any) -> Object:
    return merged(KEPT, {"engine": {"settings": settings or {}}}, values)


def test_engines_keep_their_blocks_in_memory_of_their_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file in it is named after the pod, which keeps its name when its container restarts."""
    objects = render(KEPT)
    engine = pod_of(objects, "engine")
    settings = settings_of(engine, monkeypatch)
    assert isinstance(settings, EngineSettings)
    assert settings.keep_blocks == FOLDER
    assert volumes(engine)[FOLDER]["emptyDir"] == {"medium": "Memory"}
    assert {name for name, pod in pods(objects).items() if "kept-blocks" in str(pod)} == {"engine"}


def test_the_memory_has_the_given_limit() -> None:
    engine = pod_of(render(merged(KEPT, nested("engine.keepBlocks.sizeLimit", "1100Mi"))), "engine")
    assert volumes(engine)[FOLDER]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1100Mi"}


@pytest.mark.parametrize("values", [{}, A_GPU], ids=["cpu", "gpu"])
def test_by_default_nothing_is_kept(values: Object) -> None:
    assert not [name for name, pod in all_pods(render(values)).items() if "kept-blocks" in str(pod)]


def test_the_container_beside_the_engine_does_not_have_the_memory() -> None:
    pod = pod_of(render(merged(KEPT, nested("kvmanager.placement", "engine"))), "engine")
    having = [one["name"] for one in pod["spec"]["containers"] if FOLDER in str(one["volumeMounts"])]
    assert having == [main_container(pod)["name"]] == ["engine"]


def test_one_of_several_models_keeps_its_blocks() -> None:
    models = [{"name": "a", "model": "org/a", "keepBlocks": {"enabled": True}}, {"name": "b", "model": "org/b"}]
    having = {name for name, pod in pods(render({"models": models})).items() if FOLDER in str(pod)}
    assert having == {"engine-a"}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (merged(KEPT, A_GPU), "engine.keepBlocks is enabled, but the engine has a GPU, whose memory ends with its"),
        (merged(kept({"device": "cuda"}), A_GPU), "engine.keepBlocks is enabled, but the engine has a GPU"),
        (
            merged(KEPT, nested("engine.resources.claims", [{"name": "gpu"}])),
            "engine.keepBlocks is enabled, but the engine has a GPU",
        ),
        (
            kept({"attention_backend": "triton"}),
            "engine.keepBlocks is enabled, but engine.settings.attention_backend is triton: the memory of a GPU ends",
        ),
        (
            kept({"tensor_parallel": 3}),
            "engine.keepBlocks is enabled, but engine.settings.tensor_parallel is 3: ranks keep no blocks",
        ),
        (
            merged(KEPT, nested("engine.keepBlocks.sizeLimit", "1Gi")),
            "engine.keepBlocks.sizeLimit is 1Gi, but the blocks (settings.cache_mib, 1024 MiB) need more",
        ),
        (
            merged(kept({"cache_mib": 4096}), nested("engine.keepBlocks.sizeLimit", "4G")),
            "engine.keepBlocks.sizeLimit is 4G, but the blocks (settings.cache_mib, 4096 MiB) need more",
        ),
        (
            merged(KEPT, nested("engine.resources.limits.memory", "1Gi")),
            "engine.resources.limits.memory is 1Gi, but the process (768 MiB) and its cache",
        ),
        (
            {"models": [{"name": "a", "model": "org/a", **KEPT["engine"], **A_GPU["engine"]}]},
            "models[a].keepBlocks is enabled, but the engine has a GPU",
        ),
    ],
    ids=str,
)
def test_what_an_engine_could_not_keep_is_refused_with_the_reason(values: Object, complaint: str) -> None:
    message = refusal(values)
    assert complaint in message
    assert message.count("\n- ") == 1, "only one fault is reported"


@pytest.mark.parametrize(
    "values",
    [
        merged(KEPT, nested("engine.resources.limits.memory", "1792Mi")),
        merged(kept({"device_blocks": 100}), nested("engine.keepBlocks.sizeLimit", "64Mi")),
        merged(kept({"device": "cpu"}), nested("engine.keepBlocks.sizeLimit", "1025Mi")),
    ],
    ids=str,
)
def test_kept_blocks_take_the_place_of_the_cache_within_the_limit_of_memory(values: Object) -> None:
    assert render(values)


def test_the_folder_is_no_setting_of_its_own() -> None:
    assert "additional properties 'keep_blocks' not allowed" in refusal(nested("engine.settings.keep_blocks", FOLDER))
