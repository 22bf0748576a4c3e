"""Hits that are computed again: blocks that were wrong before they had a checksum are found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blocks import CondemnReason
from engine.attention.cache import CacheGeometry, CacheLayout
from engine.proof.closeness import is_close
from engine.schedule.pool.condemnations import WrongBlock
from tests.engine.families import FAMILIES, Checkpoint
from tests.engine.kept.sealed_engine import SealedEightBitEngine, SealedEngine

Tiny = Callable[[str], Path]
Prompt = Callable[[int], list[int]]
SIZES: dict[str, Any] = {"block_size": 4, "device_blocks": 64, "token_budget": 32, "recomputed_share": 1.0}


def sealed_wrong(engine: SealedEngine, block: int, other: int) -> None:
    """Give a block the contents of another one, with their checksum, as a fault before its sealing would."""
    assert engine.memory is not None
    own = engine.memory.kinds[0]
    own.cache[block] = own.cache[other]
    sealing, wrong = own.device.sealing(block), own.device.sealing(other)
    assert sealing is not None
    assert wrong is not None
    own.device.seal(block, sealing._replace(checksum=wrong.checksum))


@pytest.mark.parametrize("made", [SealedEngine, SealedEightBitEngine])
def test_a_block_with_contents_of_other_tokens_is_found(
    tiny_model: Tiny, random_prompt: Prompt, made: type[SealedEngine]
) -> None:
    prompt = random_prompt(30)
    engine = made(tiny_model("llama"), share=1.0, **SIZES)
    expected = engine.generate([prompt], 8)
    blocks = engine.sealed()
    sealed_wrong(engine, blocks[2], blocks[4])
    engine.generate([prompt], 8)
    assert engine.proof.counts.wrong == {CondemnReason.RECOMPUTATION: 1}
    assert engine.blocks.pool.device.counts.withheld == 1
    assert engine.generate([prompt], 8) == expected


@pytest.mark.parametrize("made", [SealedEngine, SealedEightBitEngine])
def test_right_blocks_differ_by_rounding_only(
    tiny_model: Tiny, random_prompt: Prompt, made: type[SealedEngine]
) -> None:
    engine = made(tiny_model("llama"), **SIZES | {"token_budget": 7, "max_sequences": 3})
    prompts = [random_prompt(length) for length in (12, 30, 31)]
    for _ in range(3):
        for prompt in prompts:
            engine.generate([prompt], 8)
    assert engine.proof.counts.compared[CondemnReason.RECOMPUTATION] > 20
    assert not engine.proof.counts.wrong[CondemnReason.RECOMPUTATION]


def test_the_blocks_of_window_kinds_are_compared(checkpoint: Checkpoint, random_prompt: Prompt) -> None:
    engine = SealedEngine(checkpoint(FAMILIES["gemma2"]), kinds=True, **SIZES)
    prompt = random_prompt(30)
    for _ in range(3):
        engine.generate([prompt], 8)
    assert engine.proof.counts.compared[CondemnReason.RECOMPUTATION] > 10
    assert not engine.proof.counts.wrong[CondemnReason.RECOMPUTATION]


def test_a_recomputation_leaves_no_key_and_waits_for_requests(tiny_model: Tiny, random_prompt: Prompt) -> None:
    engine = SealedEngine(tiny_model("llama"), **SIZES)
    prompt = random_prompt(30)
    engine.generate([prompt], 8)
    before = {engine.seals.key(0, block) for block in engine.sealed()}
    engine.generate([prompt], 8)
    assert engine.proof.counts.compared[CondemnReason.RECOMPUTATION] == 7
    assert {engine.seals.key(0, block) for block in engine.sealed()} == before


def test_an_engine_that_drains_computes_nothing_again(tiny_model: Tiny, random_prompt: Prompt) -> None:
    engine = SealedEngine(tiny_model("llama"), **SIZES)
    prompt = random_prompt(30)
    engine.generate([prompt], 8)
    engine.submit(prompt, 8)
    engine.turn_until(lambda: engine.scheduler.running + engine.scheduler.waiting == 2)
    engine.scheduler.requests.drain()
    engine.run()
    assert CondemnReason.RECOMPUTATION not in engine.proof.counts.compared


def test_contents_that_are_no_numbers_are_not_close() -> None:
    layout = CacheLayout.of(CacheGeometry.uniform(2, 1, 4), lambda heads, size: (4, heads, size))
    right = torch.randn(layout.elements)
    for wrong in (float("nan"), float("inf")):
        block = right.clone()
        block[5] = wrong
        assert not is_close(block, right, layout)
    assert is_close(right * 1.001, right, layout)


def test_a_block_that_is_found_twice_is_missing_once(tiny_model: Tiny, random_prompt: Prompt) -> None:
    engine = SealedEngine(tiny_model("llama"), **SIZES)
    engine.generate([random_prompt(30)], 8)
    wrong = [WrongBlock(0, False, 3, reason) for reason in (CondemnReason.HIT, CondemnReason.RECOMPUTATION)]
    before = engine.scheduler.capacity.device_blocks
    for one in wrong:
        engine.scheduler._proven.condemn([one], engine.scheduler.requests.now)
    assert engine.scheduler.capacity.device_blocks == before - 1
    engine.submit(random_prompt(30), 2)
    engine.run()
    assert engine.blocks.pool.device.counts.withheld == 1
