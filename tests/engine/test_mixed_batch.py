"""Thirty-two requests of all kinds in one batch: each equals transformers' result, or its own result alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.schedule.limits import Preemption
from engine.schedule.request import Request
from tests.engine.mixed_batch import COUNT, GREEDIER, KINDS, SEQUENCES, MixedEngine, check, mixed_batch, run

Tiny = Callable[[str], Path]
MAX_TOKENS = 12
ROOMY = 1000
# In small pools nearly all requests run together at first; then the neighbour that grows takes blocks from the last.
IN_CHUNKS = SEQUENCES + len(GREEDIER.samples)


@pytest.fixture
def requests(random_prompt: Callable[[int], list[int]]) -> list[Request]:
    return mixed_batch([random_prompt(4 + 11 * number % 17) for number in range(COUNT)], MAX_TOKENS)


def test_all_at_once_in_a_large_pool(tiny_model: Tiny, requests: list[Request]) -> None:
    engine = MixedEngine(tiny_model("llama"), device_blocks=ROOMY)
    run(engine, requests)
    tally = check(engine, requests)
    assert engine.most_running == COUNT
    assert not any(tally.preemptions.values())


def test_with_prompts_in_small_chunks(tiny_model: Tiny, requests: list[Request]) -> None:
    engine = MixedEngine(tiny_model("llama"), device_blocks=ROOMY, token_budget=SEQUENCES)
    run(engine, requests)
    check(engine, requests)
    assert engine.chunks >= 8


@pytest.mark.parametrize(("device_blocks", "token_budget"), [(200, 512), (180, IN_CHUNKS)], ids=["", "in chunks"])
def test_in_a_pool_so_small_that_requests_of_every_kind_are_preempted(
    tiny_model: Tiny, requests: list[Request], device_blocks: int, token_budget: int
) -> None:
    sizes = {"device_blocks": device_blocks, "host_blocks": device_blocks, "token_budget": token_budget}
    kinds = set()
    for preemption in Preemption:
        engine = MixedEngine(tiny_model("llama"), preemption=preemption, **sizes)
        run(engine, [GREEDIER, *requests])
        tally = check(engine, requests)
        totals = engine.scheduler.totals
        assert engine.most_running > COUNT // 2
        assert (totals.recomputed_tokens > 0) == (preemption is not Preemption.SWAP)
        assert (totals.swapped_tokens > 0) == (preemption is not Preemption.RECOMPUTE)
        kinds |= {kind for kind, count in tally.preemptions.items() if count}
    assert kinds == KINDS
