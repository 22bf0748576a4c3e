"""A pool of the real core whose sequences are texts, driven by Steps as an engine sends them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from blocks import Allocate, Commit, Copy, Extend, Fork, Free, FreeReason, Pin, Step
from kvmanager import AppliedStep, BlockCounts, BlockState, Pool, PoolSpec, SequenceTable, state_of


class Mapped(NamedTuple):
    """An entry of a block table: the block, how many of its slots the sequence has filled, and the words in them."""

    block: int
    filled: int
    words: tuple[str, ...]


class PoolBlock(NamedTuple):
    """A physical block: its state, its reference count, and the words in its slots, which stay when it is released."""

    state: BlockState
    references: int
    words: tuple[str, ...]


class Snapshot(NamedTuple):
    """Block tables by sequence, the blocks of the pool by id, blocks by state, the copies of the last Step.

    `faults` is empty if the conservation law holds.
    """

    tables: Mapping[str, tuple[Mapped, ...]]
    pool: Mapping[int, PoolBlock]
    counts: BlockCounts
    copies: tuple[Copy, ...]
    faults: tuple[str, ...]

    def ids(self, name: str) -> list[int]:
        """Return the physical blocks of a sequence, in logical order."""
        return [entry.block for entry in self.tables[name]]

    def filled(self, name: str) -> list[int]:
        """Return the number of filled slots of each block of a sequence, in logical order."""
        return [entry.filled for entry in self.tables[name]]

    def references(self, *blocks: int) -> list[int]:
        """Return the reference counts of blocks."""
        return [self.pool[block].references for block in blocks]


@dataclass
class _Text:
    """A sequence: its id, that of its group, and its words."""

    id: int
    group: int
    words: list[str]


class WordPool:
    """A pool of `blocks` blocks. Words are written into slots where a model writes keys and values.

    After each Step that grants, a second one reports what was computed: lengths, and commits of full blocks.
    """

    def __init__(self, blocks: int, block_size: int, handed_out: Sequence[int] = ()) -> None:
        """Start with all blocks free; those of `handed_out` are granted first, in this order."""
        self._pool = Pool(PoolSpec("engine", 1, "model", block_size, blocks))
        self._size = block_size
        self._slots = [[""] * block_size for _ in range(blocks + 1)]
        self._texts: dict[str, _Text] = {}
        self._token_ids: dict[str, int] = {}
        self._next_id = count(blocks + 1)
        self._copies: tuple[Copy, ...] = ()
        if handed_out:
            self._order(handed_out)

    def _order(self, handed_out: Sequence[int]) -> None:
        """Let requests of one block each take the whole pool and end in an order that leaves the wanted one."""
        everything = range(1, self._pool.device.total + 1)
        self._apply(allocates=[Allocate(one, one, "", b"", [0], 1) for one in everything])
        ends = [*handed_out, *(one for one in everything if one not in handed_out)]
        self._apply(frees=[Free(one, FreeReason.FINISHED) for one in ends])

    def begin(self, name: str, words: Sequence[str], salt: bytes = b"") -> int:
        """Allocate a request and compute its prompt; return how many of its tokens were cached."""
        new = next(self._next_id)
        item = Allocate(new, new, name, salt, self._tokens(words), len(words))
        cached = self._apply(allocates=[item]).result.tables[0].cached_tokens
        self._texts[name] = _Text(new, new, list(words[:cached]))
        self._write({name: words[cached:]})
        return cached

    def fits(self, tokens: int) -> bool:
        """Begin a request of `tokens` tokens that shares nothing; return False if the core refuses it."""
        new = next(self._next_id)
        item = Allocate(new, new, "", new.to_bytes(4, "little"), [0] * tokens, tokens)
        return not self._pool.apply(Step(self._pool.last_step + 1, allocates=[item])).result.refusals

    def advance(
        self,
        words: Mapping[str, Sequence[str]],
        forks: Iterable[tuple[str, str]] = (),
        pruned: Iterable[str] = (),
    ) -> None:
        """Send a Step that forks children from parents, frees pruned sequences and gives the words room; write them."""
        forked = [self._fork(parent, child) for parent, child in forks]
        frees = [Free(self._texts.pop(name).id, FreeReason.PRUNED) for name in pruned]
        rooms: dict[int, list[tuple[int, int]]] = {}
        for name, some in words.items():
            text = self._texts[name]
            rooms.setdefault(text.group, []).append((text.id, len(text.words) + len(some)))
        self._apply(forks=forked, frees=frees, extends=[Extend(*item) for item in rooms.items()])
        self._write(words)

    def fork(self, parent: str, *children: str) -> None:
        """Let children share all blocks of a parent."""
        self.advance({}, [(parent, child) for child in children])

    def free(self, *names: str) -> None:
        """End sequences."""
        self._apply(frees=[Free(self._texts.pop(name).id, FreeReason.FINISHED) for name in names])

    def pin(self, name: str) -> None:
        """Pin the full blocks of a sequence."""
        self._apply(pins=[Pin(name, self._texts[name].id, self._table(name).committed_blocks)])

    def snapshot(self) -> Snapshot:
        """Return the state as values."""
        pool = {one: self._block(one) for one in range(1, self._pool.device.total + 1)}
        tables = {name: tuple(self._mapped(name)) for name in self._texts}
        return Snapshot(tables, pool, self._pool.device.counts, self._copies, tuple(self._pool.violations()))

    @property
    def held(self) -> int:
        """Number of held blocks; a shared one counts once."""
        return self._pool.device.counts.held

    def _block(self, block: int) -> PoolBlock:
        device = self._pool.device
        return PoolBlock(state_of(device, block), device.ref_count(block), tuple(self._slots[block]))

    def _mapped(self, name: str) -> Iterable[Mapped]:
        table = self._table(name)
        for index, block in enumerate(table.table):
            filled = min(max(table.computed_tokens - index * self._size, 0), self._size)
            yield Mapped(block, filled, tuple(self._slots[block][:filled]))

    def _table(self, name: str) -> SequenceTable:
        return self._pool.sequences[self._texts[name].id]

    def _fork(self, parent: str, child: str) -> Fork:
        source, new = self._texts[parent], next(self._next_id)
        self._texts[child] = _Text(new, source.group, list(source.words))
        return Fork(source.id, new, len(source.words))

    def _tokens(self, words: Iterable[str]) -> list[int]:
        return [self._token_ids.setdefault(word, len(self._token_ids)) for word in words]

    def _write(self, words: Mapping[str, Sequence[str]]) -> None:
        """Write words where the tables lead, then report lengths and full blocks."""
        for name, some in words.items():
            self._write_one(self._texts[name].words, self._table(name).table, some)
        copies = self._copies  # of the Step that granted, not of the one that reports
        commits = [commit for name in words if (commit := self._commit(name))]
        self._apply(commits=commits, lengths=[(self._texts[name].id, len(self._texts[name].words)) for name in words])
        self._copies = copies

    def _write_one(self, text: list[str], table: Sequence[int], words: Iterable[str]) -> None:
        for word in words:
            index, slot = divmod(len(text), self._size)
            self._slots[table[index]][slot] = word
            text.append(word)

    def _commit(self, name: str) -> Commit | None:
        text, first = self._texts[name], self._table(name).committed_blocks
        full = len(text.words) // self._size
        tokens = self._tokens(text.words[first * self._size : full * self._size])
        return Commit(text.id, first, tokens) if tokens else None

    def _apply(self, **items: Any) -> AppliedStep:
        applied = self._pool.apply(Step(self._pool.last_step + 1, **items))
        assert not applied.result.refusals, applied.result.refusals
        self._copies = applied.result.copies
        for source, destination in self._copies:
            self._slots[destination] = list(self._slots[source])
        return applied
