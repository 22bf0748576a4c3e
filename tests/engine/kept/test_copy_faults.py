"""Faults of copies, seals and memory that other systems have served as K and V: all are found before a step reads."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocks import CondemnReason, Copy
from engine.attention import TorchBackend
from engine.attention.backend import Direction
from engine.attention.cache import CacheGeometry
from engine.kept.header import KeptIdentity, KeptKind, kept_bytes
from engine.kept.kept_memory import KeptMemory
from engine.kept.seals import Sealing
from engine.kinds.kinds_backend import CachingBackend
from engine.schedule.limits import Preemption
from tests.engine.kept.sealed_engine import SealedEngine

Tiny = Callable[[str], Path]
Prompt = Callable[[int], list[int]]
Fault = Callable[["FaultyBackend", Copy, Direction], None]

SIZES: dict[str, Any] = {
    "block_size": 4,
    "device_blocks": 24,
    "host_blocks": 64,
    "token_budget": 32,
    "preemption": Preemption.SWAP,
}
KIND = KeptKind("all", "K (16, 2, 4) V (16, 2, 4): 0", 256, 8, 4)
IDENTITY = KeptIdentity("boot", "float32", 16, (KIND,), "torch", "f")
# Of a type that has another one of its size.
HALF = replace(IDENTITY, dtype="float16")


class FaultyBackend(TorchBackend):
    """Has one fault in each copy to a tier."""

    fault: Fault | None = None
    to = Direction.HOST_TO_DEVICE

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        if self.fault is None or direction is not self.to:
            super().swap(copies, direction)
            return
        for copy in copies:
            type(self).fault(self, copy, direction)  # type: ignore[misc]


def whole(backend: FaultyBackend, copy: Copy, direction: Direction) -> None:
    TorchBackend.swap(backend, [copy], direction)


def a_short_read(backend: FaultyBackend, copy: Copy, direction: Direction) -> None:
    """The copy ends before the block does, and says that it is done."""
    rows = backend.cache if direction is Direction.HOST_TO_DEVICE else backend.host_cache
    assert rows is not None
    kept = rows[copy.destination, -8:].clone()
    whole(backend, copy, direction)
    rows[copy.destination, -8:] = kept


def nothing(backend: FaultyBackend, copy: Copy, direction: Direction) -> None:
    """The copy has not begun when it says that it is done."""


def another_block(backend: FaultyBackend, copy: Copy, direction: Direction) -> None:
    """The copy reads the block behind its source."""
    rows = backend.host_cache if direction is Direction.HOST_TO_DEVICE else backend.cache
    assert rows is not None
    whole(backend, Copy(copy.source % (len(rows) - 1) + 1, copy.destination), direction)


def a_source_that_is_rewritten(backend: FaultyBackend, copy: Copy, direction: Direction) -> None:
    """Something writes to the source while it is copied."""
    rows = backend.host_cache if direction is Direction.HOST_TO_DEVICE else backend.cache
    assert rows is not None
    before = rows[copy.source].clone()
    rows[copy.source, : len(before) // 2] += 1
    whole(backend, copy, direction)
    rows[copy.source] = before


FAULTS: tuple[Fault, ...] = (a_short_read, nothing, another_block, a_source_that_is_rewritten)


class FaultyEngine(SealedEngine):
    """An engine whose copies between the tiers can be faulty."""

    def make_backend(
        self, geometry: CacheGeometry, block_size: int, device_blocks: int, host_blocks: int
    ) -> CachingBackend:
        self.faulty = FaultyBackend(geometry, block_size, device_blocks, host_blocks=host_blocks)
        return self.faulty


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("to", Direction)
def test_a_faulty_copy_is_found_and_its_group_computed_again(
    tiny_model: Tiny, random_prompt: Prompt, fault: Fault, to: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_prompt(30) for _ in range(4)]
    expected = SealedEngine(tiny_model("llama"), **SIZES).generate(prompts, 24)
    engine = FaultyEngine(tiny_model("llama"), **SIZES)
    engine.faulty.cache.normal_()  # what a copy leaves out is not right by chance
    monkeypatch.setattr(FaultyBackend, "fault", fault)
    monkeypatch.setattr(FaultyBackend, "to", to)
    ids = [engine.submit(prompt, 24) for prompt in prompts]
    engine.turn_until(lambda: engine.proof.counts.wrong.get(CondemnReason.SWAP_IN, 0) > 2 or engine.scheduler.empty)
    monkeypatch.setattr(FaultyBackend, "fault", None)
    engine.run()
    assert [engine.tokens[one] for one in ids] == expected
    assert engine.proof.counts.wrong.get(CondemnReason.SWAP_IN, 0) > 2
    assert not any(group.failure for group in engine.finished.values())


def made(identity: KeptIdentity, memory: bytearray | None = None) -> KeptMemory:
    return KeptMemory.mapped(memoryview(memory or bytearray(kept_bytes(identity))), identity)


def sealed(memory: KeptMemory) -> None:
    for block in (1, 2, 3):
        memory.kinds[0].device.seal(block, Sealing(bytes([block]) * 32, 0, 0, 7))


def test_a_seal_of_a_stale_generation_is_broken() -> None:
    memory = made(IDENTITY)
    sealed(memory)
    memory.kinds[0].device._seals["generation"][2] += 1
    assert memory.repair() == 1
    assert [memory.kinds[0].device.sealing(block) is None for block in (1, 2, 3)] == [False, True, False]


def test_a_seal_that_moved_to_another_block_is_broken() -> None:
    memory = made(IDENTITY)
    sealed(memory)
    seals = memory.kinds[0].device
    seals._seals[5] = seals._seals[1]
    memory.kinds[0].host._seals[1] = seals._seals[1]
    assert memory.repair() == 2


@pytest.mark.parametrize(
    "other",
    [
        replace(HALF, kinds=(replace(KIND, shapes="K (16, 1, 8) V (16, 1, 8): 0"),)),
        replace(HALF, dtype="bfloat16"),
        replace(HALF, fingerprint="g"),
    ],
    ids=["another number of ranks", "another type", "another model"],
)
def test_seals_of_another_layout_are_broken(other: KeptIdentity) -> None:
    memory = bytearray(kept_bytes(HALF))
    sealed(made(other, memory))
    assert made(HALF, memory).repair() == 3


@pytest.mark.parametrize("bit", range(8))
def test_each_bit_of_what_a_seal_says_is_covered(bit: int) -> None:
    for place in range(72):
        memory = made(IDENTITY)
        sealed(memory)
        seals = memory.kinds[0].device
        before = seals.sealing(2)
        seals._seals[2:3].view("u1")[place] ^= 1 << bit
        memory.repair()
        assert seals.sealing(2) in (None, before), f"byte {place}"


def test_the_checksum_of_another_block_is_found_at_the_first_hit(tiny_model: Tiny, random_prompt: Prompt) -> None:
    prompt = random_prompt(30)
    first = SealedEngine(tiny_model("llama"), **SIZES)
    expected = first.generate([prompt], 4)
    assert first.memory is not None
    blocks, seals = first.sealed(), first.memory.kinds[0].device
    sealing = seals.sealing(blocks[2])
    assert sealing is not None
    seals.seal(blocks[2], sealing._replace(checksum=seals.checksum(blocks[3])))
    second = first.successor(**SIZES)
    assert second.generate([prompt], 4) == expected
    assert second.proof.counts.wrong == {CondemnReason.ADOPTION: 1}


def test_a_seal_without_a_checksum_is_not_believed(tiny_model: Tiny, random_prompt: Prompt) -> None:
    prompt = random_prompt(30)
    first = SealedEngine(tiny_model("llama"), **SIZES)
    expected = first.generate([prompt], 4)
    assert first.memory is not None
    block, seals = first.sealed()[2], first.memory.kinds[0].device
    sealing = seals.sealing(block)
    assert sealing is not None
    seals.seal(block, sealing._replace(checksum=0))
    second = first.successor(**SIZES)
    second.flip(random.Random(1), block)
    assert second.generate([prompt], 4) == expected
    assert second.proof.counts.wrong == {CondemnReason.ADOPTION: 1}
