"""Three ranks of the demo model: the mixed batch equals transformers', and caches are slices of one rank's cache."""

import random
from pathlib import Path

import pytest

from engine.errors import ModelUnsupported
from engine.parallel.loading import ModelFolder
from engine.schedule.limits import Preemption
from engine.schedule.request import Request
from tests.acceptance.conftest import Record
from tests.acceptance.test_mixed_batch import LARGE, SMALL, note, requests
from tests.engine.mixed_batch import COUNT, GREEDIER, KINDS, MixedEngine, check, run
from tests.engine.parallel.engine_of_ranks import ParallelEngine, compare_contents
from tests.engine.parallel.other_ranks import Sizes, other_ranks

__all__ = ["requests"]  # a fixture
RANKS = 3
BLOCK_SIZE = 4


def test_all_requests_at_once_on_three_ranks(demo_model: Path, requests: list[Request], record: Record) -> None:
    with other_ranks(demo_model, RANKS, Sizes(BLOCK_SIZE, LARGE)) as others:
        engine = ParallelEngine(demo_model, others, device_blocks=LARGE)
        run(engine, requests)
    note(record, engine, check(engine, requests))
    assert engine.most_running == COUNT


@pytest.mark.parametrize("way", Preemption)
def test_requests_of_every_kind_are_preempted_on_three_ranks(
    demo_model: Path, requests: list[Request], record: Record, way: Preemption
) -> None:
    with other_ranks(demo_model, RANKS, Sizes(BLOCK_SIZE, SMALL, SMALL)) as others:
        engine = ParallelEngine(demo_model, others, device_blocks=SMALL, host_blocks=SMALL, preemption=way)
        run(engine, [GREEDIER, *requests])
    note(record, engine, tally := check(engine, requests))
    totals = engine.scheduler.totals
    assert {kind for kind, count in tally.preemptions.items() if count} == set(KINDS)
    assert (totals.recomputed_tokens > 0) == (way is not Preemption.SWAP)
    assert (totals.swapped_tokens > 0) == (way is not Preemption.RECOMPUTE)


def test_caches_of_three_ranks_are_slices_of_one(demo_model: Path, requests: list[Request], record: Record) -> None:
    draw = random.Random(20)
    compared = 0
    with other_ranks(demo_model, RANKS, Sizes(BLOCK_SIZE, LARGE)) as others:
        parallel = ParallelEngine(demo_model, others, device_blocks=LARGE)
        alone = MixedEngine(demo_model, device_blocks=LARGE)
        for one in requests:
            parallel.take(one)
            alone.take(one)
        while not alone.scheduler.empty:
            parallel.turn()
            alone.turn()
            assert parallel.blocks.pool.sequences == alone.blocks.pool.sequences
            if draw.random() < 0.4:
                compared += 1
                compare_contents(others, alone.backend.cache)
    record(compared=compared)
    assert compared > 1


def test_two_ranks_are_refused_with_the_numbers_that_work(demo_model: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"9 attention heads and 3 KV heads: possible are 1, 3$"):
        ModelFolder(demo_model, 2)
