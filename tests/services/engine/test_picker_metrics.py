"""The engine's page has what endpoint pickers of the Gateway API inference extension read from a model server.

Names and labels are those of its model server protocol (kubernetes-sigs/gateway-api-inference-extension 1.5,
docs/proposals/003-model-server-protocol), and of the built-in mapping for vLLM in llm-d-router 0.10
(core-metrics-extractor). `vllm:lora_requests_info` is optional there, and Quire has no LoRA adapters.
"""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.schedule.stats import SchedulerTotals
from services.engine.metrics import EngineMetrics
from services.engine.observer import CacheStats, EngineStats
from services.runtime.metrics.page import Exposition, MetricsPage

pytestmark = pytest.mark.anyio

STATS = EngineStats(3, 5, SchedulerTotals(), cache=CacheStats(16, 400, 50, 0.25))
LABELS = {"model_name": "tiny-llama", "engine": "pod-1"}


async def page(compat: str, *, started: bool = True) -> dict[str, list[tuple[dict[str, str], float]]]:
    metrics = EngineMetrics(compat)
    if started:
        metrics.on_start("tiny-llama", "pod-1", lambda: STATS)
    text = await MetricsPage(Exposition(metrics.registry, "", compat=compat)).text()
    families = text_string_to_metric_families(text.decode())
    samples = [sample for family in families for sample in family.samples]
    assert len({(one.name, *sorted(one.labels.items())) for one in samples}) == len(samples), "a series exists twice"
    return {
        name: [(one.labels, one.value) for one in samples if one.name == name] for name in {s.name for s in samples}
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm:num_requests_waiting", 5),
        ("vllm:num_requests_running", 3),
        ("vllm:kv_cache_usage_perc", 0.25),
        ("vllm:gpu_cache_usage_perc", 0.25),
    ],
)
async def test_a_picker_finds_the_engines_load_in_one_series(name: str, value: float) -> None:
    assert (await page("vllm"))[name] == [(LABELS, value)]


async def test_a_picker_finds_size_and_number_of_blocks_as_labels_with_whole_numbers() -> None:
    ((labels, value),) = (await page("vllm"))["vllm:cache_config_info"]
    assert (int(labels["block_size"]), int(labels["num_gpu_blocks"]), value) == (16, 400, 1)
    assert labels.items() >= LABELS.items()


async def test_an_engine_that_loads_its_model_shows_no_load() -> None:
    shown = await page("vllm", started=False)
    assert [name for name in shown if name.startswith("vllm:")] == []


async def test_without_vllms_names_the_pool_is_on_the_kv_managers_page_alone() -> None:
    shown = await page("none")
    assert [name for name in shown if name.startswith("vllm:") or "cache" in name] == [
        name for name in shown if name.startswith("quire_prompt_tokens_cached")
    ]
