"""Two ranks on one model: the mixed batch has one rank's tokens, and each cache is one rank's slice of heads."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import AttentionBackend
from engine.parallel.leader import LeadingRunner
from engine.run.runner import ModelRunner
from engine.schedule.limits import Preemption
from engine.schedule.request import Request
from engine.schedule.step_plan import Runner
from tests.engine.families import FAMILIES, write_checkpoint
from tests.engine.mixed_batch import COUNT, GREEDIER, SEQUENCES, MixedEngine, check, mixed_batch, run
from tests.engine.parallel.other_ranks import OtherRanks, Sizes, other_ranks

Tiny = Callable[[str], Path]
TOLERANCE = 1e-4  # relative to the largest number: sums over ranks have another order
MAX_TOKENS = 8
BLOCK_SIZE = 4
LARGE = 1000


class ParallelEngine(MixedEngine):
    """Rank 0 of several ranks."""

    def __init__(self, folder: Path, others: OtherRanks, **sizes: Any) -> None:
        self._others = others
        super().__init__(folder, **sizes)

    def make_backend(self, _block_size: int, _device_blocks: int, _host_blocks: int) -> AttentionBackend:
        return self._others.mine.backend

    def make_runner(self, block_size: int, ahead: bool) -> Runner:
        mine = self._others.mine
        share = mine.ranks.broadcast if ahead else (lambda tokens: tokens)
        runner = ModelRunner(mine.loaded, mine.backend, block_size, decoder=mine.decoder, share=share)
        return LeadingRunner(runner, self._others.send, ahead=ahead)


@pytest.fixture(params=["llama", "qwen3", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_checkpoint(FAMILIES[request.param], tmp_path)
    return tmp_path


@pytest.fixture
def requests(random_prompt: Callable[[int], list[int]]) -> list[Request]:
    return mixed_batch([random_prompt(4 + 11 * number % 17) for number in range(COUNT)], MAX_TOKENS)


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_two_ranks_have_the_tokens_of_one(folder: Path, requests: list[Request], ahead: bool) -> None:
    with other_ranks(folder, 2, Sizes(BLOCK_SIZE, LARGE)) as others:
        engine = ParallelEngine(folder, others, device_blocks=LARGE, ahead=ahead)
        run(engine, requests)
    check(engine, requests)
    assert engine.most_running == COUNT


@pytest.mark.parametrize("preemption", Preemption)
def test_two_ranks_copy_and_swap_the_same_blocks(folder: Path, requests: list[Request], preemption: Preemption) -> None:
    blocks = 200
    with other_ranks(folder, 2, Sizes(BLOCK_SIZE, blocks, blocks)) as others:
        sizes = {"device_blocks": blocks, "host_blocks": blocks, "preemption": preemption}
        engine = ParallelEngine(folder, others, **sizes)
        run(engine, [GREEDIER, *requests])
        assert sum(check(engine, requests).preemptions.values())
        totals = engine.scheduler.totals
    assert (totals.recomputed_tokens > 0) == (preemption is not Preemption.SWAP)
    assert (totals.swapped_tokens > 0) == (preemption is not Preemption.RECOMPUTE)


def test_each_rank_has_its_heads_of_every_block(folder: Path, requests: list[Request]) -> None:
    draw = random.Random(4)
    with other_ranks(folder, 2, Sizes(BLOCK_SIZE, LARGE)) as others:
        parallel = ParallelEngine(folder, others, device_blocks=LARGE, token_budget=SEQUENCES)
        alone = MixedEngine(folder, device_blocks=LARGE, token_budget=SEQUENCES)
        for one in requests:
            parallel.take(one)
            alone.take(one)
        compared = 0
        while not alone.scheduler.empty:
            parallel.turn()
            alone.turn()
            assert parallel.blocks.pool.sequences == alone.blocks.pool.sequences
            if draw.random() < 0.2:
                compared += 1
                _compare_contents(others, alone.backend.cache)
        assert parallel.scheduler.empty
    assert compared > 1
    assert parallel.samples == alone.samples


def _compare_contents(others: OtherRanks, whole: torch.Tensor) -> None:
    """Compare all blocks: heads are the last but one dimension."""
    size = others.mine.ranks.size
    for rank, heads in enumerate(whole.chunk(size, dim=-2)):
        worst = (others.contents(rank) - heads).abs().max()
        assert worst <= TOLERANCE * whole.abs().max(), f"rank {rank}"
