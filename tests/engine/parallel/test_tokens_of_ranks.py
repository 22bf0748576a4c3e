"""Two ranks on one model: the mixed batch has one rank's tokens, and each cache is one rank's slice of heads."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.schedule.limits import Preemption
from engine.schedule.request import Request
from tests.engine.families import FAMILIES, write_checkpoint
from tests.engine.mixed_batch import COUNT, GREEDIER, SEQUENCES, MixedEngine, check, mixed_batch, run
from tests.engine.parallel.engine_of_ranks import ParallelEngine, compare_contents
from tests.engine.parallel.other_ranks import Sizes, other_ranks
from tests.engine.triton_case import DEVICE

Tiny = Callable[[str], Path]
MAX_TOKENS = 8
BLOCK_SIZE = 4
LARGE = 1000
UNEVEN = {
    "vocab_size": 391,
    "intermediate_size": 76,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 72,
    "head_dim": 8,
    "num_hidden_layers": 2,
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of the family that the test names, or a Llama."""
    write_checkpoint(FAMILIES[getattr(request, "param", "llama")], tmp_path)
    return tmp_path


@pytest.fixture
def requests(random_prompt: Callable[[int], list[int]]) -> list[Request]:
    return mixed_batch([random_prompt(4 + 11 * number % 17) for number in range(COUNT)], MAX_TOKENS)


@pytest.mark.parametrize(
    ("folder", "ahead"),
    [("llama", False), ("llama", True), ("qwen3", False), ("gemma2", False)],
    ids=["llama", "llama, launched ahead", "qwen3", "gemma2, by transformers' plan"],
    indirect=["folder"],
)
def test_two_ranks_have_the_tokens_of_one(folder: Path, requests: list[Request], ahead: bool) -> None:
    with other_ranks(folder, 2, Sizes(BLOCK_SIZE, LARGE)) as others:
        engine = ParallelEngine(folder, others, device_blocks=LARGE, ahead=ahead)
        run(engine, requests)
    check(engine, requests)
    assert engine.most_running == COUNT


@pytest.mark.gpu_path
@pytest.mark.skipif(DEVICE.type == "cuda", reason="both ranks would use one GPU")
def test_two_ranks_with_few_launches_have_the_tokens_of_one(folder: Path, requests: list[Request]) -> None:
    pytest.importorskip("triton")
    few = requests[:3]
    with other_ranks(folder, 2, Sizes(BLOCK_SIZE, 100, fused=True)) as others:
        assert type(others.mine.decoder).__name__ == "FusedParallelLlama"
        engine = ParallelEngine(folder, others, device_blocks=100, ahead=True)
        run(engine, few)
    check(engine, few)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the ranks would use one GPU")
@pytest.mark.parametrize("fused", [pytest.param(True, marks=pytest.mark.gpu_path), False])
def test_three_ranks_with_parts_of_unequal_length_have_the_tokens_of_one(
    tmp_path: Path, requests: list[Request], *, fused: bool
) -> None:
    """Odd numbers of heads, and an MLP and a vocabulary that three do not divide: the last rank has less."""
    pytest.importorskip("triton")
    family = FAMILIES["qwen2"]
    write_checkpoint(family._replace(config=family.config | UNEVEN), tmp_path)
    few = requests[:3]
    with other_ranks(tmp_path, 3, Sizes(BLOCK_SIZE, 100, fused=fused)) as others:
        engine = ParallelEngine(tmp_path, others, device_blocks=100, ahead=True)
        run(engine, few)
    check(engine, few)


@pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE])
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
                compare_contents(others, alone.backend.cache)
        assert parallel.scheduler.empty
    assert compared > 1
    assert parallel.samples == alone.samples
