"""The Jobs that fetch models before a rollout."""

import json

from tests.deployment.helm.chart import (
    Object,
    by_name,
    containers,
    merged,
    of_kind,
    render,
    render_ci,
)

CLAIM = {"modelCache": {"persistence": {"enabled": True, "existingClaim": "models"}}}
FETCH = merged(CLAIM, {"modelFetch": {"enabled": True}})


def jobs(values: Object) -> list[Object]:
    return of_kind(render(merged(FETCH, values)), "Job")


def test_each_model_is_fetched_once_before_an_install_and_an_upgrade() -> None:
    models = [
        {"name": "a", "model": "org/a"},
        {"name": "again", "model": "org/a", "settings": {"model_name": "other"}},
        {"name": "there", "model": "/var/cache/quire/there"},
        {"name": "packed", "model": "/var/cache/quire/packed.gguf"},
    ]
    found = jobs({"models": models})
    assert [one["metadata"]["name"] for one in found] == ["blue-quire-model-fetch-a", "blue-quire-model-fetch-packed"]
    assert [one["spec"]["template"]["spec"]["containers"][0]["args"] for one in found] == [
        ["model", "org/a"],
        ["model", "/var/cache/quire/packed.gguf"],
    ]
    for one in found:
        assert one["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"


def test_a_fetch_has_the_cache_and_the_environment_of_its_engines() -> None:
    small, large = of_kind(render_ci("managers"), "Job")
    engines = containers(render_ci("managers"))
    for job, name in ((small, "engine-135m"), (large, next(one for one in engines if one.startswith("engine-qwen")))):
        spec = job["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}} in container["env"]
        assert container["image"] == engines[name]["image"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        claims = {one["name"]: one["persistentVolumeClaim"] for one in spec["volumes"] if "emptyDir" not in one}
        assert claims[mounts["/var/cache/quire"]] == {"claimName": "models"}


def test_a_fetch_ends_and_uses_nothing_that_an_install_creates_later() -> None:
    (job,) = jobs({})
    assert (job["spec"]["activeDeadlineSeconds"], job["spec"]["backoffLimit"]) == (3600, 3)
    assert job["spec"]["ttlSecondsAfterFinished"] == 86400
    spec = job["spec"]["template"]["spec"]
    assert (spec["restartPolicy"], spec["serviceAccountName"]) == ("Never", "default")
    later = [item["metadata"]["name"] for item in render(FETCH) if "helm.sh/hook" not in json.dumps(item)]
    assert [name for name in later if f'"{name}"' in json.dumps(spec)] == []


def test_a_fetch_may_reach_the_sources_of_models_and_nothing_reaches_it() -> None:
    policy = by_name(render_ci("managers"), "NetworkPolicy")["model-fetch"]
    job, *_ = of_kind(render_ci("managers"), "Job")
    selector = policy["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert policy["spec"]["ingress"] == []
    assert [one["port"] for rule in policy["spec"]["egress"] for one in rule["ports"]] == [53, 53, 443]
    hooks = [one["metadata"]["annotations"] for one in (policy, job)]
    assert {one["helm.sh/hook"] for one in hooks} == {"pre-install,pre-upgrade"}
    assert int(hooks[0]["helm.sh/hook-weight"]) < int(hooks[1]["helm.sh/hook-weight"]), "before the Job"


def test_nothing_is_fetched_by_default() -> None:
    assert of_kind(render(CLAIM), "Job") == []
