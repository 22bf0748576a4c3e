"""Bits of blocks that are flipped where no step reads them: no token changes, and what is hit is condemned."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from blocks import CondemnReason, Copy
from engine.attention import TorchBackend
from engine.attention.backend import Direction
from engine.attention.cache import CacheGeometry
from engine.kept.kept_memory import KeptMemory
from engine.kept.seal_writer import SealWriter
from engine.kinds.kinds_backend import CachingBackend
from engine.proof.block_proof import BlockProof
from engine.schedule.limits import Preemption
from engine.schedule.step_plan import Copies
from tests.engine.families import FAMILIES, Checkpoint
from tests.engine.kept.flips import between_lives, on_the_host
from tests.engine.kept.sealed_engine import NativeEngine, SealedEightBitEngine, SealedEngine, WindowedEngine

Tiny = Callable[[str], Path]
Prompt = Callable[[int], list[int]]
Way = tuple[type[SealedEngine], Path]
WAYS: dict[str, type[SealedEngine]] = {
    "float32": SealedEngine,
    "int8": SealedEightBitEngine,
    "windows": WindowedEngine,
    "kernels": NativeEngine,
}
SMALL_POOL: dict[str, Any] = {"device_blocks": 24, "host_blocks": 64, "preemption": Preemption.SWAP}
SIZES: dict[str, Any] = {"block_size": 4, "device_blocks": 64, "token_budget": 32}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Way:
    """An engine and its model."""
    return WAYS[request.param], checkpoint(FAMILIES["gemma2" if request.param == "windows" else "llama"])


def test_a_flipped_bit_of_an_adopted_block_is_found_at_its_first_hit(tiny_model: Tiny, random_prompt: Prompt) -> None:
    prompt = random_prompt(30)
    before = SealedEngine(tiny_model("llama"), **SIZES)
    expected = before.generate([prompt], 8)
    table = before.sealed()
    after = before.successor(**SIZES)
    after.flip(random.Random(1), table[3])
    assert after.generate([prompt], 8) == expected
    assert after.proof.counts.wrong == {CondemnReason.ADOPTION: 1}
    assert after.blocks.pool.device.counts.withheld == 1
    assert after.finished["r0"].stats.cached_tokens == 0, "all keys are withdrawn"
    again = after.generate([prompt], 8)
    assert again == expected
    assert after.proof.counts.wrong == {CondemnReason.ADOPTION: 1}, "its block is not hit any more"


def test_no_flipped_bit_between_two_lives_reaches_a_token(way: Way) -> None:
    assert between_lives(*way, seed=1, rounds=8).found > 3


def test_no_flipped_bit_of_a_seal_reaches_a_token(way: Way) -> None:
    assert between_lives(*way, seed=2, rounds=6, seals=True).count > 20


def test_no_flipped_bit_on_the_host_reaches_a_token(way: Way) -> None:
    assert on_the_host(*way, seed=3, count=40).found > 5


def test_a_group_that_is_swapped_in_wrong_is_computed_again(tiny_model: Tiny, random_prompt: Prompt) -> None:
    engine = SealedEngine(tiny_model("llama"), **SIZES | SMALL_POOL)
    prompts = [random_prompt(30) for _ in range(4)]
    expected = engine.generate(prompts, 24)
    again = SealedEngine(tiny_model("llama"), **SIZES | SMALL_POOL)
    ids = [again.submit(prompt, 24) for prompt in prompts]
    again.turn_until(again.host_blocks_in_use)
    again.turn()  # its copies are made
    for block in again.host_blocks_in_use():
        again.flip(random.Random(block), block, host=True)
    again.run()
    assert [again.tokens[one] for one in ids] == expected
    assert again.proof.counts.wrong[CondemnReason.SWAP_IN] > 2
    assert not any(group.failure for group in again.finished.values())


class FailingBackend(TorchBackend):
    """Copies that fail while `fails`, each whose source is odd."""

    fails = False

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        if self.fails and any(copy.source % 2 for copy in copies):
            raise MemoryError("no memory")
        super().swap(copies, direction)


class FailingEngine(SealedEngine):
    """An engine whose copies between the tiers can fail."""

    def make_backend(
        self, geometry: CacheGeometry, block_size: int, device_blocks: int, host_blocks: int
    ) -> CachingBackend:
        self.failing = FailingBackend(geometry, block_size, device_blocks, host_blocks=host_blocks)
        return self.failing


def test_copies_that_fail_are_misses(tiny_model: Tiny, random_prompt: Prompt) -> None:
    prompts = [random_prompt(30) for _ in range(4)]
    expected = SealedEngine(tiny_model("llama"), **SIZES | SMALL_POOL).generate(prompts, 24)
    engine = FailingEngine(tiny_model("llama"), **SIZES | SMALL_POOL)
    engine.failing.fails = True
    ids = [engine.submit(prompt, 24) for prompt in prompts]
    engine.turn_until(lambda: engine.proof.counts.wrong.get(CondemnReason.COPY, 0) > 3)
    engine.failing.fails = False
    engine.run()
    assert [engine.tokens[one] for one in ids] == expected
    assert not any(group.failure for group in engine.finished.values())


def test_blocks_that_never_left_are_compared_if_they_are_sampled(tiny_model: Tiny, random_prompt: Prompt) -> None:
    prompt = random_prompt(30)
    for share, found in ((0.0, {}), (1.0, {CondemnReason.HIT: 1})):
        engine = SealedEngine(tiny_model("llama"), share=share, **SIZES)
        expected = engine.generate([prompt], 8)
        engine.flip(random.Random(1), engine.sealed()[2])
        answers = engine.generate([prompt], 8)
        assert engine.proof.counts.wrong == found
        if found:
            assert answers == expected


def test_a_request_that_shares_a_wrong_block_is_computed_again_too(tiny_model: Tiny, random_prompt: Prompt) -> None:
    shared, ends = random_prompt(20), [random_prompt(9) for _ in range(3)]
    prompts = [shared + end for end in ends]
    engine = SealedEngine(tiny_model("llama"), **SIZES)
    engine.generate([shared + random_prompt(1)], 1)
    after = engine.successor(**SIZES)
    expected = SealedEngine(tiny_model("llama"), **SIZES).generate(prompts, 8)
    after.flip(random.Random(1), after.sealed()[1])
    assert after.generate(prompts, 8) == expected
    assert after.proof.counts.wrong == {CondemnReason.ADOPTION: 1}


def test_a_pinned_prefix_with_a_wrong_block_is_computed_and_pinned_again(
    tiny_model: Tiny, random_prompt: Prompt
) -> None:
    prompt = random_prompt(20)
    engine = SealedEngine(tiny_model("llama"), share=1.0, **SIZES)
    engine.scheduler.requests.pin("p", tuple(prompt), b"", engine.now())
    engine.turn_until(lambda: engine.blocks.pool.state.pins)
    engine.turn()  # its answer comes
    before = engine.blocks.pool.state.pins["p"][:]
    engine.flip(random.Random(1), before[1])
    engine.submit(prompt + random_prompt(5), 4)
    engine.run()
    after = engine.blocks.pool.state.pins["p"]
    assert (before[1] in after, len(after)) == (False, len(before))


def test_a_block_that_was_found_wrong_is_withheld_in_the_next_life_too(tiny_model: Tiny, random_prompt: Prompt) -> None:
    prompt = random_prompt(30)
    first = SealedEngine(tiny_model("llama"), **SIZES)
    first.generate([prompt], 4)
    second = first.successor(**SIZES)
    wrong = second.sealed()[2]
    second.flip(random.Random(1), wrong)
    second.generate([prompt], 4)
    third = second.successor(**SIZES)
    assert third.report.device.withheld == [wrong]
    third.generate([prompt], 4)
    assert third.blocks.pool.device.marks.is_withheld_or_marked(wrong)


def test_nothing_is_counted_as_compared_without_checksums(tiny_model: Tiny, random_prompt: Prompt) -> None:
    engine = SealedEngine(tiny_model("llama"), **SIZES | SMALL_POOL)
    seals = SealWriter(KeptMemory.private([(one.cache, one.host_cache) for one in engine.proof.backends]))
    proof = BlockProof(engine.proof.backends, seals)
    copies = Copies(device_to_host=(Copy(1, 2),)), Copies(host_to_device=(Copy(2, 3),))
    assert not proof.check(copies, [])
    assert not any(proof.counts.compared.values())


@pytest.mark.parametrize("reason", [CondemnReason.ADOPTION, CondemnReason.HIT])
def test_no_block_that_was_computed_from_a_wrong_one_is_hit_afterwards(
    tiny_model: Tiny, random_prompt: Prompt, reason: CondemnReason
) -> None:
    prefix, suffix = random_prompt(13), random_prompt(20)
    expected = SealedEngine(tiny_model("llama"), **SIZES).generate([prefix + suffix], 8)
    first = SealedEngine(tiny_model("llama"), **SIZES)
    first.generate([prefix], 1)
    first.bytes_of(0)[first.sealed()[1]] ^= 64
    assert first.generate([prefix + suffix], 8) != expected, "a running step reads a block without a comparison"
    second = first.successor(share=1.0, **SIZES) if reason is CondemnReason.ADOPTION else first
    second.proof._share = 1.0
    answers = [second.generate([prefix + suffix], 8) for _ in range(4)]
    assert second.proof.counts.wrong == {reason: 1}
    assert answers == [expected] * 4
