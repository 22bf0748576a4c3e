"""The state of one pool: two tiers of blocks, the sequences with their tables, and the pins. Verbs write in them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from blocks import Copy, blocks_for, root_key
from kvmanager import limits, parts
from kvmanager.applied import Outcome
from kvmanager.errors import IdInUse, InvalidItem, OutOfBlocks, UnknownSequence
from kvmanager.parts import Parts, pop_parts
from kvmanager.pool_spec import PoolSpec
from kvmanager.tier.tier import Eviction, Seal, Tier


@dataclass(slots=True)
class SequenceTable:
    """A sequence and its block table: append-only, filled left to right.

    `prompt` counts the tokens that it was allocated with, all of which are to be computed first. `room` counts the
    tokens that may be written; `computed` those that the engine says it has; `committed` the
    leading blocks of the table that have keys as this sequence's own prefix, the last of which is `key` (or the
    root, while there are none). The table is of host blocks while it is `swapped`, else of device blocks.
    """

    id: int
    group: int
    request_id: str
    salt: bytes
    resets: int  # of the pool, when it began
    root: bytes
    table: list[int] = field(default_factory=list)
    prompt: int = 0
    room: int = 0
    computed: int = 0
    committed: int = 0
    key: bytes = b""
    swapped: bool = False

    def __post_init__(self) -> None:
        self.key = self.key or self.root


class PoolState:
    """State of a pool, and the small steps that several verbs have in common."""

    def __init__(self, spec: PoolSpec, device: Tier, host: Tier) -> None:
        """Start without sequences."""
        self.spec = spec
        self.block_size = spec.block_size
        self.device = device
        self.host = host
        self.sequences: dict[int, SequenceTable] = {}
        self.groups: dict[int, list[int]] = {}  # members in order of their ids
        self.pins: dict[str, list[int]] = {}
        self.resets = 0
        self.stepping = False  # between two slices of a Step that was not told of yet
        self._device_releases: list[int] = []
        self._host_releases: list[int] = []
        # Blocks with a holder that is no table entry and no pin: a verb that is done in parts has taken them already,
        # or not given them back yet.
        self.under_way: list[int] = []
        self.host_under_way: list[int] = []
        self._withheld: tuple[list[int], list[int]] = ([], [])

    def root(self, salt: bytes) -> bytes:
        """Return what the keys of a sequence that begins now are chained to."""
        return root_key(self.spec.model_fingerprint, salt, self.resets)

    def sequence(self, number: int) -> SequenceTable:
        """Return a sequence. Raises UnknownSequence."""
        found = self.sequences.get(number)
        if found is None:
            raise UnknownSequence(f"there is no sequence {number}")
        return found

    def on_device(self, number: int) -> SequenceTable:
        """Return a sequence whose blocks are in the device tier. Raises UnknownSequence or InvalidItem."""
        found = self.sequence(number)
        if found.swapped:
            raise InvalidItem(f"sequence {number} is swapped out")
        return found

    def members(self, group: int) -> list[SequenceTable]:
        """Return the sequences of a group, in order of their ids. Raises UnknownSequence."""
        if group not in self.groups:
            raise UnknownSequence(f"there is no group {group}")
        return [self.sequences[number] for number in self.groups[group]]

    def check_new(self, number: int) -> None:
        """Raise InvalidItem or IdInUse unless a sequence can get this id."""
        if number < 1:
            raise InvalidItem(f"sequence is {number}, ids are at least 1")
        if number in self.sequences:
            raise IdInUse(f"sequence {number} exists")
        if len(self.sequences) >= limits.MAX_SEQUENCES:
            raise OutOfBlocks(f"the pool has {limits.MAX_SEQUENCES} sequences, which is all that it may have")

    def check_shares(self, more: int) -> None:
        """Raise OutOfBlocks unless so many more table entries and pins can hold what others hold."""
        if self.device.saved + more > limits.MAX_SHARES:
            raise OutOfBlocks(f"{more} blocks more would be shared, {limits.MAX_SHARES} may be in all")

    def add(self, sequence: SequenceTable) -> None:
        """Take a new sequence in."""
        self.sequences[sequence.id] = sequence
        group = self.groups.setdefault(sequence.group, [])
        group.append(sequence.id)
        if len(group) > 1:
            group.sort()

    def remove(self, sequence: SequenceTable) -> None:
        """Forget a sequence; its table is somebody else's business."""
        del self.sequences[sequence.id]
        group = self.groups[sequence.group]
        group.remove(sequence.id)
        if not group:
            del self.groups[sequence.group]

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens fill."""
        return blocks_for(tokens, self.block_size)

    def check_available(self, needed: int) -> None:
        """Raise OutOfBlocks unless so many device blocks can be handed out."""
        if needed > self.device.available:
            raise OutOfBlocks(f"{needed} blocks are needed, {self.device.available} are free")

    def grant(self, number: int, outcome: Outcome) -> list[int]:
        """Hand out device blocks; there must be so many. What is evicted for them moves to a free host block."""
        blocks = self.device.grant_many(number)
        outcome.granted_blocks += number
        if self.device.evictions:
            self._demote(self.device.take_evictions(), outcome)
        return blocks

    def granting(self, table: list[int], number: int, outcome: Outcome) -> Parts:
        """Hand out device blocks, of which there must be so many, and put them at the end of a table, in parts."""
        while number:
            blocks = self.grant(min(number, parts.PART), outcome)
            table += blocks
            number -= len(blocks)
            yield len(blocks)

    def grant_one(self, outcome: Outcome) -> int:
        """Hand out one device block. Raises OutOfBlocks when none is left."""
        device = self.device
        block = device.grant()
        outcome.granted_blocks += 1
        if device.evictions:
            self._demote(device.take_evictions(), outcome)
        return block

    def _demote(self, evictions: list[Eviction], outcome: Outcome) -> None:
        outcome.evicted += evictions
        for block, key in evictions:
            if self.host.free and self.host.keys.find(key) is None:
                parked = self.host.park(key)
                outcome.device_to_host.append(Copy(block, parked))
                outcome.host_sealed.append(Seal(parked, key))

    def release_after_step(self, blocks: Iterable[int]) -> None:
        """Release device blocks that a copy of this Step reads: handed out within it, they could be overwritten."""
        self._device_releases += blocks

    def release_host_after_step(self, blocks: Iterable[int]) -> None:
        """Release host blocks: a copy of this Step may read them after one that would write them."""
        self._host_releases += blocks

    def releasing(self, blocks: list[int]) -> Parts:
        """Release device blocks, the last one first, and what else is under way, in parts."""
        self.under_way += blocks
        for part in pop_parts(self.under_way):
            self.device.release(reversed(part))
            yield len(part)

    def end_step(self) -> Parts:
        """Do what waited for the end of the Step."""
        for tier, releases in ((self.device, self._device_releases), (self.host, self._host_releases)):
            releases.reverse()
            for part in pop_parts(releases):
                tier.release(reversed(part))
                yield len(part)

    def withhold(self, device: Mapping[int, int], host: Mapping[int, int]) -> None:
        """Take blocks with so many holders out of circulation, as `Tier.withhold` does; the next Step tells of it."""
        for tier, holders, told in zip((self.device, self.host), (device, host), self._withheld, strict=True):
            tier.withhold(holders)
            told += sorted(holders)

    def take_withheld(self) -> tuple[list[int], list[int]]:
        """Return the device blocks and the host blocks that were withheld since the last call."""
        withheld, self._withheld = self._withheld, ([], [])
        return withheld

    def violations(self) -> list[str]:
        """Check the conservation law: each id in one place, count = number of holders; a sentence for each fault."""
        held: dict[int, int] = {}
        held_in_host: dict[int, int] = {}
        for sequence in self.sequences.values():
            holders = held_in_host if sequence.swapped else held
            for block in sequence.table:
                holders[block] = holders.get(block, 0) + 1
        # Between two slices of a Step: what it gives back at its end is still held.
        for block in chain(self.under_way, self._device_releases, *self.pins.values()):
            held[block] = held.get(block, 0) + 1
        for block in chain(self.host_under_way, self._host_releases):
            held_in_host[block] = held_in_host.get(block, 0) + 1
        faults = self.device.violations(held)
        faults += [f"host: {fault}" for fault in self.host.violations(held_in_host)]
        members = {number for group in self.groups.values() for number in group}
        if members != self.sequences.keys():
            faults.append(f"groups and sequences differ: {sorted(members ^ self.sequences.keys())}")
        return faults
