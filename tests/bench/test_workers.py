"""The work of benchmarks inside one process."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.blocks import copies
from bench.engine import context
from bench.loads import engine_worker
from bench.loads.workers import host_worker, waits_worker
from engine.attention import TorchBackend
from engine.attention.cache import CacheGeometry
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts, assemble
from tests.engine.native_kernels import FOLDER as KERNELS


@pytest.fixture(scope="module")
def parts(tiny_model: Callable[[str], Path]) -> EngineParts:
    return assemble(
        EngineSettings(model=str(tiny_model("llama")), dtype="float32", device_blocks=64, kernels_folder=str(KERNELS))
    )


def test_the_engine_in_process_generates_all_tokens(parts: EngineParts) -> None:
    figures = engine_worker.run(parts, [{"prompt": [20 + number] * 9, "tokens": 5} for number in range(6)])
    assert figures["seconds"] > 0
    assert figures["cpu_seconds"] > 0


def test_each_token_but_the_first_is_timed_and_prefixes_hit_the_cache(parts: EngineParts) -> None:
    engine = context.engine_of(parts)
    text = tuple(range(10, 110))
    for prompt_tokens, name in ((48, "short"), (80, "long"), (80, "again")):
        request = context.Request(name, text[:prompt_tokens], context.GREEDY, context.Stopping(6))
        assert len(context.decode(engine, request)) == 5
    assert engine.scheduler.totals.cached_tokens == 48 + 64


def test_copies_have_distinct_sources_and_destinations() -> None:
    backend = TorchBackend(CacheGeometry.uniform(1, 1, 2), 1, copies.BLOCKS, host_blocks=copies.BLOCKS)
    backend.cache.normal_()
    assert backend.host_cache is not None
    before = backend.cache.clone()
    ways = copies._ways("", backend, random.Random(1))
    ways["swap_out"]()
    assert len(backend.host_cache.flatten(1).any(dim=1).nonzero()) == copies.COPIED
    ways["copy"]()
    changed = (backend.cache != before).flatten(1).any(dim=1)
    assert int(changed.sum()) == copies.COPIED


def test_requests_behind_one_cached_prompt_are_admitted_together() -> None:
    shared = waits_worker.behind_prefixes(shared=True, cached=True)
    own = waits_worker.behind_prefixes(shared=False, cached=True)
    assert shared["answers"] <= 2
    assert shared["first_token_p50"] <= 1.2 * own["first_token_p50"]


def test_a_cold_prompt_of_many_requests_is_computed_once() -> None:
    assert waits_worker.behind_prefixes(shared=True, cached=False)["prefix_computed_times"] == pytest.approx(
        1.0, abs=0.1
    )


def test_steps_without_a_model_take_cpu_time() -> None:
    assert asyncio.run(host_worker.in_process({"sequences": 2, "context": 20, "steps": 5})) > 0
