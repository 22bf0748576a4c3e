"""A pool: the block space of one engine, and the verbs on it.

One door, `apply`: a Step goes in, a StepResult comes out, every item all or nothing. Same Steps, same block ids.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kvmanager.errors import (
    IdInUse,
    InvalidItem,
    InvalidRegistration,
    ItemRefused,
    OutOfBlocks,
    StepOutOfOrder,
    UnknownSequence,
)
from kvmanager.keys import block_key, root_key
from kvmanager.step import (
    Allocate,
    Commit,
    Copy,
    Extend,
    Fork,
    Free,
    Length,
    Refusal,
    Seal,
    Step,
    StepItem,
    StepRefusal,
    StepResult,
    TableChange,
)
from kvmanager.tier import Tier

_Item = TypeVar("_Item")

_REFUSALS = {
    OutOfBlocks: StepRefusal.OUT_OF_BLOCKS,
    UnknownSequence: StepRefusal.UNKNOWN,
    IdInUse: StepRefusal.ALREADY_EXISTS,
    InvalidItem: StepRefusal.INVALID,
}


@dataclass(frozen=True)
class PoolSpec:
    """What an engine says of its pool. Raises InvalidRegistration, naming the field, where a pool cannot be so."""

    engine_id: str
    incarnation: int
    model_fingerprint: str
    block_size: int
    device_blocks: int
    host_blocks: int = 0
    model: str = ""  # its name, for people

    def __post_init__(self) -> None:
        if not self.engine_id:
            raise InvalidRegistration("engine_id is empty")
        for name in ("incarnation", "block_size", "device_blocks"):
            if getattr(self, name) < 1:
                raise InvalidRegistration(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.host_blocks < 0:
            raise InvalidRegistration(f"host_blocks is {self.host_blocks}, it must not be negative")


@dataclass(slots=True)
class Sequence:
    """A sequence and its block table: append-only, filled left to right.

    `room` counts the tokens that may be written; `computed` those that the engine says it has; `committed` the
    leading blocks of the table that have keys as this sequence's own prefix.
    """

    id: int
    group: int
    request_id: str
    root: bytes
    table: list[int] = field(default_factory=list)
    room: int = 0
    computed: int = 0
    committed: int = 0


class _Write(NamedTuple):
    """A block that `extend` makes writable: a new entry of the table, or the replacement of a shared or keyed one."""

    sequence: Sequence
    entry: int
    replaces: bool


class Pool:
    """Block tables of one engine's sequences over one device tier."""

    def __init__(self, spec: PoolSpec) -> None:
        """Start with every block free and no sequence."""
        self.spec = spec
        self.device = Tier(spec.device_blocks)
        self.sequences: dict[int, Sequence] = {}
        self.groups: dict[int, set[int]] = {}
        self.last_step = 0
        self._copied_from: list[int] = []

    def apply(self, step: Step) -> StepResult:
        """Apply a Step, item by item. Raises StepOutOfOrder, and does nothing, unless its number is a new highest."""
        if step.step <= self.last_step:
            raise StepOutOfOrder(f"step {step.step} came after step {self.last_step}")
        self.last_step = step.step
        evicted_before = self.device.evicted
        result = StepResult(step.step)
        self._apply_each(StepItem.COMMIT, step.commits, self._commit, result)
        self._apply_each(StepItem.FORK, step.forks, self._fork, result)
        self._apply_each(StepItem.FREE, step.frees, self._free, result)
        self._apply_each(StepItem.EXTEND, step.extends, self._extend, result)
        self._apply_each(StepItem.ALLOCATE, step.allocates, self._allocate, result)
        self._apply_each(StepItem.LENGTH, step.lengths, self._set_length, result)
        self._release_copied()
        result.device = self.device.counts
        result.evicted_blocks = self.device.evicted - evicted_before
        return result

    def computed_tokens(self) -> int:
        """Return the tokens computed in held blocks, those of shared blocks counted once.

        Looks at sequences, not at all blocks of their tables: whoever shares a block usually has it full, so only
        shared blocks that a holder has not filled need a closer look.
        """
        size = self.spec.block_size
        tokens = sum(sequence.computed for sequence in self.sequences.values()) - size * self.device.saved
        for block, fills in self._unfilled_shared_blocks().items():
            most = size if self.device.count(block) > len(fills) else max(fills)
            tokens += most - sum(fills) + size * (len(fills) - 1)
        return tokens

    def _unfilled_shared_blocks(self) -> dict[int, list[int]]:
        """Return the shared blocks that a holder has not filled, with the tokens that each such holder has in them."""
        unfilled: dict[int, list[int]] = {}
        for sequence in self.sequences.values():
            full, tokens = divmod(sequence.computed, self.spec.block_size)
            for block in sequence.table[full:]:
                if self.device.count(block) > 1:
                    unfilled.setdefault(block, []).append(tokens)
                tokens = 0
        return unfilled

    def violations(self) -> list[str]:
        """Check the conservation law: free + cached + held = total, each id once, count = number of holders."""
        holders: dict[int, int] = {}
        for sequence in self.sequences.values():
            for block in sequence.table:
                holders[block] = holders.get(block, 0) + 1
        faults = self.device.violations(holders)
        members = {sequence for group in self.groups.values() for sequence in group}
        if members != self.sequences.keys():
            faults.append(f"groups and sequences differ: {sorted(members ^ self.sequences.keys())}")
        return faults

    def _apply_each(
        self, kind: StepItem, items: Iterable[_Item], verb: Callable[[_Item, StepResult], None], result: StepResult
    ) -> None:
        for position, item in enumerate(items):
            try:
                verb(item, result)
            except ItemRefused as refused:
                result.refusals.append(Refusal(kind, position, _REFUSALS[type(refused)], str(refused)))

    def _commit(self, item: Commit, result: StepResult) -> None:
        sequence = self._sequence(item.sequence)
        blocks = self._whole_blocks(sequence, item)
        size = self.spec.block_size
        key = self._last_key(sequence)
        seals = []
        for position, block in enumerate(blocks):
            key = block_key(key, item.token_ids[position * size : (position + 1) * size])
            seals.append(Seal(block, key))
        for seal in seals:
            self._check_same_key(seal)
        for seal in seals:
            if self.device.key(seal.block) is None:
                self.device.seal(seal.block, seal.key)
                result.sealed.append(seal)
        sequence.committed += len(blocks)

    def _whole_blocks(self, sequence: Sequence, item: Commit) -> list[int]:
        count, rest = divmod(len(item.token_ids), self.spec.block_size)
        last = item.first_index + count
        if rest or not count:
            raise InvalidItem(f"token_ids has {len(item.token_ids)} tokens, which is not a whole number of blocks")
        if item.first_index != sequence.committed:
            raise InvalidItem(f"first_index is {item.first_index}, but {sequence.committed} blocks are committed")
        if last * self.spec.block_size > sequence.room:
            raise InvalidItem(f"sequence {sequence.id} has room for {sequence.room} tokens, not for {last} blocks")
        return sequence.table[item.first_index : last]

    def _check_same_key(self, seal: Seal) -> None:
        # A block shared by a fork may be committed through either sequence, but it has only one content.
        if self.device.key(seal.block) not in (None, seal.key):
            raise InvalidItem(f"block {seal.block} has another key already")

    def _fork(self, item: Fork, result: StepResult) -> None:
        parent = self._sequence(item.parent)
        self._check_new(item.child)
        if not 1 <= item.length <= parent.room:
            raise InvalidItem(f"length is {item.length}, the parent has room for {parent.room} tokens")
        self._cut(parent, item.length)
        for block in parent.table:
            self.device.hold(block)
        child = Sequence(item.child, parent.group, parent.request_id, parent.root, list(parent.table), item.length)
        child.computed = parent.computed
        child.committed = parent.committed
        self._add(child)
        result.tables.append(TableChange(parent.id, len(parent.table), [], parent.room))
        result.tables.append(TableChange(child.id, 0, list(child.table), child.room))

    def _cut(self, sequence: Sequence, length: int) -> None:
        """Drop blocks beyond `length` tokens, tail first, and take the room that is left of the last one away."""
        keep = _blocks_for(length, self.spec.block_size)
        while len(sequence.table) > keep:
            self.device.release(sequence.table.pop())
        sequence.room = length
        sequence.computed = min(sequence.computed, length)
        sequence.committed = min(sequence.committed, length // self.spec.block_size)

    def _free(self, item: Free, _result: StepResult) -> None:
        sequence = self._sequence(item.sequence)
        for block in reversed(sequence.table):
            self.device.release(block)
        del self.sequences[sequence.id]
        members = self.groups[sequence.group]
        members.discard(sequence.id)
        if not members:
            del self.groups[sequence.group]

    def _extend(self, item: Extend, result: StepResult) -> None:
        rooms = [(self._member(item.group, sequence), tokens) for sequence, tokens in item.rooms]
        if len({sequence for sequence, _ in item.rooms}) < len(rooms):
            raise InvalidItem("a sequence is listed twice")
        # Counted before they are listed: a length out of all bounds must not cost memory.
        size = self.spec.block_size
        self._check_available(sum(max(0, _blocks_for(tokens, size) - len(member.table)) for member, tokens in rooms))
        writes = self._planned_writes(rooms)
        self._check_available(len(writes))
        old_rooms = [sequence.room for sequence, _ in rooms]
        for write in writes:
            self._make_writable(write, result)
        for (sequence, tokens), old_room in zip(rooms, old_rooms, strict=True):
            if tokens > old_room:
                sequence.room = len(sequence.table) * self.spec.block_size
                first = old_room // self.spec.block_size
                result.tables.append(TableChange(sequence.id, first, sequence.table[first:], sequence.room))

    def _check_available(self, needed: int) -> None:
        if needed > self.device.available:
            raise OutOfBlocks(f"{needed} blocks are needed, {self.device.available} are free")

    def _planned_writes(self, rooms: list[tuple[Sequence, int]]) -> list[_Write]:
        """List what has to be granted, changing nothing. Holders that move to a copy no longer count as sharing."""
        size = self.spec.block_size
        moved: dict[int, int] = {}
        writes = []
        for sequence, tokens in rooms:
            if tokens <= sequence.room:
                continue
            for index in range(sequence.room // size, _blocks_for(tokens, size)):
                if index >= len(sequence.table):
                    writes.append(_Write(sequence, index, replaces=False))
                elif self._needs_copy(block := sequence.table[index], moved.get(block, 0)):
                    moved[block] = moved.get(block, 0) + 1
                    writes.append(_Write(sequence, index, replaces=True))
        return writes

    def _needs_copy(self, block: int, moved: int) -> bool:
        return self.device.count(block) - moved > 1 or self.device.key(block) is not None

    def _make_writable(self, write: _Write, result: StepResult) -> None:
        block = self._grant(result)
        if not write.replaces:
            write.sequence.table.append(block)
            return
        source = write.sequence.table[write.entry]
        write.sequence.table[write.entry] = block
        result.copies.append(Copy(source, block))
        if self.device.count(source) > 1:
            self.device.release(source)
        else:
            # Released only after the Step: handed out again within it, it could be overwritten before it is read.
            self._copied_from.append(source)

    def _release_copied(self) -> None:
        for block in self._copied_from:
            self.device.release(block)
        self._copied_from.clear()

    def _allocate(self, item: Allocate, result: StepResult) -> None:
        self._check_new(item.sequence)
        if item.group in self.groups:
            raise IdInUse(f"group {item.group} exists")
        if not item.token_ids or item.compute_tokens < 1 or item.spare_blocks < 0:
            raise InvalidItem("token_ids and compute_tokens must not be empty, spare_blocks not negative")
        sequence = Sequence(
            item.sequence, item.group, item.request_id, root_key(self.spec.model_fingerprint, item.salt)
        )
        hits = self._find_prefix(sequence.root, item.token_ids)
        self._check_fits(item, hits)
        self._take_prefix(sequence, hits)
        size = self.spec.block_size
        room = min(len(item.token_ids), len(hits) * size + item.compute_tokens)
        while len(sequence.table) < _blocks_for(room, size):
            sequence.table.append(self._grant(result))
        sequence.room = len(sequence.table) * size
        self._add(sequence)
        cached = len(hits) * size
        result.hit_tokens += cached
        result.query_tokens += len(item.token_ids)
        result.tables.append(TableChange(sequence.id, 0, list(sequence.table), sequence.room, cached))

    def _find_prefix(self, root: bytes, token_ids: Items[int]) -> list[int]:
        """Return the cached blocks of the longest prefix that leaves at least one token to compute."""
        size = self.spec.block_size
        hits: list[int] = []
        key = root
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            key = block_key(key, token_ids[start : start + size])
            block = self.device.find(key)
            if block is None:
                break
            hits.append(block)
        return hits

    def _check_fits(self, item: Allocate, hits: list[int]) -> None:
        idle_hits = sum(self.device.count(block) == 0 for block in hits)
        needed = _blocks_for(len(item.token_ids), self.spec.block_size) - len(hits) + item.spare_blocks
        if needed > self.device.available - idle_hits:
            raise OutOfBlocks(f"{needed} blocks are needed, {self.device.available - idle_hits} are free")

    def _take_prefix(self, sequence: Sequence, hits: list[int]) -> None:
        for block in hits:
            self.device.hold(block)
        sequence.table = list(hits)
        sequence.committed = len(hits)
        sequence.computed = len(hits) * self.spec.block_size

    def _set_length(self, item: Length, _result: StepResult) -> None:
        sequence = self._sequence(item.sequence)
        if not 0 <= item.tokens <= sequence.room:
            raise InvalidItem(f"{item.tokens} tokens computed, but there is room for {sequence.room}")
        sequence.computed = item.tokens

    def _grant(self, result: StepResult) -> int:
        result.granted_blocks += 1
        return self.device.grant()

    def _last_key(self, sequence: Sequence) -> bytes:
        if not sequence.committed:
            return sequence.root
        key = self.device.key(sequence.table[sequence.committed - 1])
        assert key is not None, "committed blocks have keys"
        return key

    def _sequence(self, sequence: int) -> Sequence:
        if sequence not in self.sequences:
            raise UnknownSequence(f"there is no sequence {sequence}")
        return self.sequences[sequence]

    def _member(self, group: int, sequence: int) -> Sequence:
        member = self._sequence(sequence)
        if member.group != group:
            raise InvalidItem(f"sequence {sequence} is not of group {group}")
        return member

    def _check_new(self, sequence: int) -> None:
        if sequence < 1:
            raise InvalidItem(f"sequence is {sequence}, ids are at least 1")
        if sequence in self.sequences:
            raise IdInUse(f"sequence {sequence} exists")

    def _add(self, sequence: Sequence) -> None:
        self.sequences[sequence.id] = sequence
        self.groups.setdefault(sequence.group, set()).add(sequence.id)


def _blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
