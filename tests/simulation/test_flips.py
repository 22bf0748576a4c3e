"""Flipped bits in the simulator: what is left out of the checks, and that the product finds them."""

from itertools import islice
from pathlib import Path
from random import Random

import torch

from blocks import Copy
from engine.attention.backend import Direction
from engine.schedule.capacity import Capacity
from simulation.digest_memory import DigestMemory
from simulation.invariants.expected_contents import differ
from simulation.scenario import FLIPS, drawn
from simulation.simulation import Simulation, violation_of

# Of the seeds with flips, of which about a third find some.
SCENARIOS = 12


def test_flipped_bits_are_found_and_their_blocks_condemned(folder: Path) -> None:
    with_flips = (one for one in map(drawn, range(10**6)) if any(fault.kind in FLIPS for fault in one.faults))
    flips = condemned = 0
    for scenario in islice(with_flips, SCENARIOS):
        simulation = Simulation(scenario, folder)
        assert violation_of(simulation) is None
        flips += simulation.flips.count
        condemned += simulation.condemned
    assert flips > condemned > 0


def memory_of(device_blocks: int = 3, host_blocks: int = 2) -> DigestMemory:
    return DigestMemory(Capacity(16, 8, 2, device_blocks, host_blocks))


def flipped(memory: DigestMemory, block: int, *, host: bool = False) -> list[int]:
    """The slots of a block that differ from -1, the contents of a new memory."""
    row = (memory.host if host else memory.device)[block]
    return torch.nonzero(row != -1).flatten().tolist()


def test_a_flip_changes_one_slot_of_a_block_and_no_second_flip_mends_it() -> None:
    memory = memory_of()
    memory.flipped.flip(Random(1), memory.device, 2, host=False)
    assert flipped(memory, 2) == sorted(memory.flipped.of(False, 2))
    assert len(memory.flipped.of(False, 2)) == 1
    before = memory.device.clone()
    memory.flipped.flip(Random(1), memory.device, 2, host=False)
    assert torch.equal(memory.device, before)


def test_copies_carry_flipped_slots_and_writes_end_them() -> None:
    memory = memory_of()
    memory.flipped.flip(Random(1), memory.device, 1, host=False)
    (slot,) = memory.flipped.of(False, 1)
    memory.copy_blocks([Copy(1, 2)])
    memory.swap([Copy(2, 1)], Direction.DEVICE_TO_HOST)
    memory.swap([Copy(1, 3)], Direction.HOST_TO_DEVICE)
    places = [(False, 1), (False, 2), (True, 1), (False, 3)]
    assert [memory.flipped.of(*place) for place in places] == [{slot}] * 4
    for block in (1, 2):
        memory.write(block, 1 - slot, 7)
        assert memory.flipped.of(False, block) == {slot}
        memory.write(block, slot, 7)
        assert not memory.flipped.of(False, block)
    memory.copy_blocks([Copy(1, 3)])
    memory.swap([Copy(1, 1)], Direction.DEVICE_TO_HOST)
    assert not memory.flipped.any


def test_only_flipped_slots_may_differ() -> None:
    assert not differ((1, 2), (1, 2))
    assert differ((1, 3), (1, 2))
    assert not differ((1, 3), (1, 2), {1})
    assert differ((1, 3), (1, 2), {0})
    assert differ((1, 2), None)
    assert differ((1, 2), None, {0})
    assert not differ((1, 2), None, {0, 1})
