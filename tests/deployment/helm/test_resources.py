"""Resources and images that cannot work are refused, and those that can are accepted."""

from typing import Any

import pytest

from engine.model.memory_plan import CPU_PROCESS_BYTES
from tests.deployment.helm.chart import CHART, Object, merged, nested, refusal, render

ON_GPU = {"settings": {"device": "cuda"}}
# With the cache that an engine on a CPU has by default.
LEAST_MIB = (CPU_PROCESS_BYTES >> 20) + 1024
A_MODEL = {"name": "a", "model": "org/a"}


def engine(memory: Any = None, gpus: Any = None, **settings: Any) -> Object:
    limits = {"memory": memory, "nvidia.com/gpu": gpus}
    given = {name: value for name, value in limits.items() if value is not None}
    return {"engine": {"settings": settings, "resources": {"limits": given} if given else {}}}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            engine(f"{LEAST_MIB - 1}Mi"),
            f"engine.resources.limits.memory is {LEAST_MIB - 1}Mi, but the process (768 MiB) and its cache "
            f"(settings.cache_mib, 1024 MiB) need {LEAST_MIB}Mi before any weights: the kernel would kill the engine",
        ),
        (engine("9G", cache_mib=8192), "its cache (settings.cache_mib, 8192 MiB) need 8960Mi before any weights"),
        (engine(2**30), "need 1792Mi before any weights"),
        (engine("1.5Gi", device="cpu"), "engine.resources.limits.memory is 1.5Gi, but"),
        (engine("700Mi", device_blocks=10), "but the process (768 MiB) need 768Mi before any weights"),
        (engine("2Gi", tensor_parallel=2), "its cache (settings.cache_mib, 2048 MiB) need 2816Mi"),
        (
            {"models": [{**A_MODEL, "resources": {"limits": {"memory": "1Gi"}}}]},
            "models[a].resources.limits.memory is 1Gi, but",
        ),
        (
            {"engine": ON_GPU},
            "engine.settings.device is cuda, but engine.resources has no GPU: the engine would find none, so set "
            "engine.resources.limits, such as nvidia.com/gpu: 1",
        ),
        ({"models": [{**A_MODEL, **ON_GPU}]}, "models[a].settings.device is cuda, but models[a].resources has no GPU"),
        (
            engine(gpus=1, device="cuda", tensor_parallel=2),
            "engine.settings.tensor_parallel needs 2 GPUs in a pod, but engine.resources.limits has nvidia.com/gpu: 1",
        ),
    ],
    ids=str,
)
def test_resources_that_cannot_work_are_refused_with_the_reason(values: Object, complaint: str) -> None:
    message = refusal(values)
    assert complaint in message
    assert message.count("\n- ") == 1, "only one fault is reported"


@pytest.mark.parametrize(
    "values",
    [
        engine(f"{LEAST_MIB}Mi"),
        engine("1Gi", device_blocks=100),
        engine("1Gi", gpus=1),
        engine("1Gi", gpus="1", device="cuda", cache_mib=40960),
        engine("2e9"),
        merged({"engine": ON_GPU}, {"engine": {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}}),
        merged({"engine": ON_GPU}, {"engine": {"resources": {"claims": [{"name": "gpu"}]}}}),
        nested("image.repository", "registry.example.org:5000/team/quire"),
        nested("image.tag", "0.2.0-cuda_1"),
    ],
    ids=str,
)
def test_resources_and_images_that_can_work_are_accepted(values: Object) -> None:
    assert render(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repository", "REGISTRY/quire"),
        ("repository", "registry.example.org/Quire"),
        ("repository", "https://registry.example.org/quire"),
        ("repository", "registry.example.org/quire:0.2.0"),
        ("repository", ""),
        ("tag", "cuda build"),
    ],
)
def test_a_name_of_an_image_that_no_node_could_pull_is_refused(name: str, value: str) -> None:
    assert f"at '/image/{name}': '{value}' does not match pattern" in refusal(nested(f"image.{name}", value))


def test_the_chart_plans_with_the_memory_of_the_process_as_quire_plan_does() -> None:
    assert f"add $cache {CPU_PROCESS_BYTES >> 20} " in (CHART / "templates" / "_resource-checks.tpl").read_text()
