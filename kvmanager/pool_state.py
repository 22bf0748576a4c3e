"""The state of one pool: two tiers of blocks, the sequences with their tables, and the pins. Verbs modify it.

A pool with window kinds has a state of its own for each: with its own tiers and tables, of the same sequences.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from blocks import Copy, WindowKind, blocks_for, counted, root_key
from kvmanager import limits, parts
from kvmanager.applied import Outcome
from kvmanager.errors import IdInUse, InvalidItem, OutOfBlocks, UnknownKind, UnknownSequence, shortage
from kvmanager.parts import Parts, pop_parts
from kvmanager.pool_spec import PoolSpec, truncated
from kvmanager.tier.tier import Eviction, Seal, Tier


@dataclass(slots=True)
class SequenceTable:
    """A sequence and its block table: append-only, filled left to right.

    `prompt_tokens` counts the tokens of the allocate, which are computed first. `room_tokens` counts the tokens that
    may be written, `computed_tokens` those that the engine has reported as computed. `committed_blocks` counts the
    leading blocks with keys of this sequence's own prefix; `last_key` is the last of these keys, or `root`. The table
    has host blocks while the sequence is `swapped`, else device blocks.

    In a window kind the table lacks the first `dropped` logical blocks: no query from position `trimmed_to` on sees
    them. `retained` are numbers of leading blocks behind which a later prompt may continue: the blocks that it needs
    keep their keys when they leave this sequence's window.
    """

    id: int
    group: int
    request_id: str
    salt: bytes
    resets: int  # of the pool before the sequence began
    root: bytes
    table: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    room_tokens: int = 0
    computed_tokens: int = 0
    committed_blocks: int = 0
    last_key: bytes = b""
    swapped: bool = False
    dropped: int = 0
    trimmed_to: int = 0
    retained: tuple[int, ...] = ()

    @property
    def blocks(self) -> int:
        """Number of logical blocks, with those that were dropped."""
        return self.dropped + len(self.table)

    def __post_init__(self) -> None:
        self.last_key = self.last_key or self.root


class PoolState:
    """State of a pool, and the operations that several verbs share."""

    def __init__(
        self,
        spec: PoolSpec,
        device: Tier,
        host: Tier,
        windows: "Sequence[PoolState]" = (),
        kind: WindowKind | None = None,
    ) -> None:
        """Start without sequences. `windows` are the states of window kinds, each of which has a `kind`."""
        self.spec = spec
        self.windows = tuple(windows)
        self.kind = kind
        self.kind_name = kind.name if kind else ""
        self.block_size = spec.block_size
        self.device = device
        self.host = host
        self.sequences: dict[int, SequenceTable] = {}
        self.groups: dict[int, dict[int, None]] = {}  # sequence ids, which the dict keeps as an ordered set
        self.pins: dict[str, list[int]] = {}
        self.resets = 0
        self.stepping = False  # True between two slices of a block step
        self._device_releases: list[int] = []
        self._host_releases: list[int] = []
        # Blocks held by neither a table entry nor a pin, because a verb that runs in parts has acquired them already or
        # not released them yet.
        self.in_flight: list[int] = []
        self.host_in_flight: list[int] = []
        self._withheld: tuple[list[int], list[int]] = ([], [])

    @classmethod
    def empty(cls, spec: PoolSpec) -> "PoolState":
        """Return the state of a pool whose blocks are all free."""
        windows = [
            cls(spec.of(kind), Tier(kind.device_blocks), Tier(kind.host_blocks), kind=kind) for kind in spec.windows
        ]
        return cls(spec, Tier(spec.device_blocks), Tier(spec.host_blocks), windows)

    @property
    def kinds(self) -> "tuple[PoolState, ...]":
        """The states of all kinds, kind 0 first."""
        return (self, *self.windows)

    def of_kind(self, name: str) -> "PoolState":
        """Return the state of a kind, empty for kind 0. Raises UnknownKind."""
        for state in self.kinds:
            if state.kind_name == name:
                return state
        names = ", ".join(window.kind_name for window in self.windows) or "none"
        raise UnknownKind(f"kind must be empty or a window kind of the pool ({names}), not {truncated(name)!r}")

    def root(self, salt: bytes) -> bytes:
        """Return the parent of the first key of a sequence that begins now."""
        return root_key(self.spec.model_fingerprint, salt, self.resets)

    def sequence(self, sequence_id: int) -> SequenceTable:
        """Return a sequence. Raises UnknownSequence."""
        found = self.sequences.get(sequence_id)
        if found is None:
            raise UnknownSequence(f"sequence {sequence_id} does not exist")
        return found

    def on_device(self, sequence_id: int) -> SequenceTable:
        """Return a sequence of the device tier. Raises UnknownSequence, and InvalidItem if it is swapped out."""
        found = self.sequence(sequence_id)
        if found.swapped:
            raise InvalidItem(f"sequence {sequence_id} is swapped out")
        return found

    def members(self, group: int) -> list[SequenceTable]:
        """Return the sequences of a group in order of their ids. Raises UnknownSequence."""
        if group not in self.groups:
            raise UnknownSequence(f"group {group} does not exist")
        return [self.sequences[sequence_id] for sequence_id in sorted(self.groups[group])]

    def check_new(self, sequence_id: int) -> None:
        """Raise InvalidItem, IdInUse or OutOfBlocks unless a sequence with this id can be added."""
        if sequence_id < 1:
            raise InvalidItem(f"sequence must be at least 1, not {sequence_id}")
        if sequence_id in self.sequences:
            raise IdInUse(f"sequence {sequence_id} already exists")
        if len(self.sequences) >= limits.MAX_SEQUENCES:
            raise OutOfBlocks(f"the pool already has {limits.MAX_SEQUENCES} sequences, which is the maximum")

    def check_shares(self, more: int) -> None:
        """Raise OutOfBlocks unless `more` holders can be added to held blocks.

        Both tiers count, because groups that are swapped out take the holders of their blocks along.
        """
        if self.device.saved + self.host.saved + more > limits.MAX_SHARES:
            raise OutOfBlocks(f"sharing {counted(more, 'more block')} would exceed the maximum of {limits.MAX_SHARES}")

    def add(self, sequence: SequenceTable) -> None:
        """Add a new sequence."""
        self.sequences[sequence.id] = sequence
        if sequence.group in self.groups:
            self.groups[sequence.group][sequence.id] = None
        else:
            self.groups[sequence.group] = {sequence.id: None}

    def remove(self, sequence: SequenceTable) -> None:
        """Remove a sequence without releasing its blocks."""
        del self.sequences[sequence.id]
        group = self.groups[sequence.group]
        del group[sequence.id]
        if not group:
            del self.groups[sequence.group]

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens need."""
        return blocks_for(tokens, self.block_size)

    def check_available(self, needed: int) -> None:
        """Raise OutOfBlocks unless `needed` device blocks can be handed out."""
        if needed > self.device.available:
            raise OutOfBlocks(shortage(needed, self.device.available, kind=self.kind_name))

    def grant(self, count: int, outcome: Outcome) -> list[int]:
        """Hand out `count` device blocks, and move evicted contents to free host blocks.

        The caller has checked that there are enough.
        """
        blocks = self.device.grant_many(count)
        outcome.granted_blocks += count
        if self.device.evictions:
            self._demote(self.device.take_evictions(), outcome)
        return blocks

    def granting(self, table: list[int], count: int, outcome: Outcome) -> Parts:
        """Append `count` granted device blocks to a table, in parts, as `grant` does."""
        while count:
            blocks = self.grant(min(count, parts.PART), outcome)
            table += blocks
            count -= len(blocks)
            yield len(blocks)

    def grant_one(self, outcome: Outcome) -> int:
        """Hand out one device block. Raises OutOfBlocks if none is available."""
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
                host_block = self.host.cache_free_block(key)
                outcome.device_to_host.append(Copy(block, host_block))
                outcome.host_sealed.append(Seal(host_block, key))

    def release_after_step(self, blocks: Iterable[int]) -> None:
        """Release device blocks at the end of the block step, because its copies read them."""
        self._device_releases += blocks

    def release_host_after_step(self, blocks: Iterable[int]) -> None:
        """Release host blocks at the end of the block step, because its copies may read them after others write."""
        self._host_releases += blocks

    def releasing(self, blocks: list[int]) -> Parts:
        """Release device blocks and all blocks in flight, in parts, the last block first."""
        self.in_flight += blocks
        for part in pop_parts(self.in_flight):
            self.device.release(reversed(part))
            yield len(part)

    def end_step(self) -> Parts:
        """Release the blocks whose release was deferred to the end of the block step."""
        for tier, releases in ((self.device, self._device_releases), (self.host, self._host_releases)):
            releases.reverse()
            for part in pop_parts(releases):
                tier.release(reversed(part))
                yield len(part)

    def withhold(self, device: Mapping[int, int], host: Mapping[int, int]) -> None:
        """Withhold blocks, given with their numbers of holders, as `Tier.withhold`; the next result lists them."""
        for tier, holders, withheld in zip((self.device, self.host), (device, host), self._withheld, strict=True):
            tier.withhold(holders)
            withheld += sorted(holders)

    def take_withheld(self) -> tuple[list[int], list[int]]:
        """Return the device blocks and the host blocks withheld since the last call."""
        withheld, self._withheld = self._withheld, ([], [])
        return withheld

    def violations(self) -> list[str]:
        """Check the conservation law: each block has one state, and its reference count equals its number of holders.

        Returns a message for each fault, also of window kinds.
        """
        faults = _own_violations(self)
        for window in self.windows:
            found = _own_violations(window)
            if not self.stepping:  # between two slices of a block step, an item is applied to some kinds only
                found += differences(self, window)
            faults += [f"kind {window.kind_name}: {fault}" for fault in found]
        return faults


# Fields of a sequence that are equal in all kinds.
COMMON_FIELDS = (
    *("group", "request_id", "salt", "resets", "prompt_tokens", "room_tokens", "swapped"),
    *("blocks", "committed_blocks", "last_key"),
)


def differences(state: PoolState, window: PoolState) -> list[str]:
    """Compare a window kind's sequences with those of kind 0: rooms, commits and the blocks they must have."""
    if state.sequences.keys() != window.sequences.keys() or state.pins.keys() != window.pins.keys():
        return ["its sequences or pins are not those of kind 0"]
    faults = []
    for sequence_id, own in state.sequences.items():
        other = window.sequences[sequence_id]
        for name in COMMON_FIELDS:
            if getattr(own, name) != getattr(other, name):
                faults.append(f"{name} of sequence {sequence_id} differs from kind 0")
    return faults


def _own_violations(state: PoolState) -> list[str]:
    held: dict[int, int] = {}
    held_in_host: dict[int, int] = {}
    for sequence in state.sequences.values():
        holders = held_in_host if sequence.swapped else held
        for block in sequence.table:
            holders[block] = holders.get(block, 0) + 1
    # Between two slices of a block step, blocks whose release is deferred to its end are still held.
    for block in chain(state.in_flight, state._device_releases, *state.pins.values()):
        held[block] = held.get(block, 0) + 1
    for block in chain(state.host_in_flight, state._host_releases):
        held_in_host[block] = held_in_host.get(block, 0) + 1
    faults = state.device.violations(held)
    faults += [f"host: {fault}" for fault in state.host.violations(held_in_host)]
    members = {sequence_id for group in state.groups.values() for sequence_id in group}
    if members != state.sequences.keys():
        faults.append(f"groups and sequences differ: {sorted(members ^ state.sequences.keys())}")
    return faults
