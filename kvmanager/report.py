"""Reports: all there is to know of a pool, as its engine tells it when it attaches again.

The same report always rebuilds the same pool: ids, counts, keys and the order in which blocks will be handed out.
Writing one and adopting one take time by the size of the pool, so both are generators that pause between slices.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from kvmanager.errors import InvalidReport
from kvmanager.keys import KEY_BYTES, root_key
from kvmanager.pool import Pool
from kvmanager.pool_spec import PoolSpec, shortened
from kvmanager.pool_state import PoolState, Sequence
from kvmanager.report_checks import Sharing, check_numbers
from kvmanager.tier import NO_KEY, Tier

_Entry = TypeVar("_Entry")

# Entries that are looked at without a pause: well below a millisecond.
_SLICE = 1000
_DISMANTLED_SEQUENCES = 8


@dataclass
class SequenceReport:
    """A sequence: its table, in the host tier if it is swapped, and what its next block's key will be chained to.

    `resets` is how often the pool had been reset when the sequence began.
    """

    sequence: int
    group: int
    request_id: str
    salt: bytes
    resets: int
    block_ids: list[int]
    room_tokens: int
    computed_tokens: int
    committed_blocks: int
    swapped: bool = False
    prompt_tokens: int = 0


@dataclass
class TierReport:
    """The blocks of a tier, but for its tables.

    `keyed` are blocks with their keys in sealing order, `unfindable` held blocks that no key leads to, with their keys
    (NO_KEY: none yet), `release_order` all blocks at count 0 in the order in which they will be handed out, `withheld`
    those that an audit took out of circulation, or takes out once nobody holds them.
    """

    # Dicts of plain values are the one form that a garbage collector does not walk through again and again.
    keyed: dict[int, bytes] = field(default_factory=dict)
    unfindable: dict[int, bytes] = field(default_factory=dict)
    release_order: list[int] = field(default_factory=list)
    withheld: list[int] = field(default_factory=list)


@dataclass
class PoolReport:
    """A pool. Without sequences, pins and blocks it means: this pool holds nothing and begins anew."""

    sequences: list[SequenceReport] = field(default_factory=list)
    pins: dict[str, list[int]] = field(default_factory=dict)
    device: TierReport = field(default_factory=TierReport)
    host: TierReport = field(default_factory=TierReport)
    resets: int = 0
    last_step: int = 0

    def dismantle(self) -> Generator[None, None, None]:
        """Give the memory of a report that nobody reads any more back, with pauses: all at once takes long."""
        for tier in (self.device, self.host):
            for keys in (tier.keyed, tier.unfindable):
                while keys:
                    for _ in range(min(len(keys), _SLICE)):
                        keys.popitem()
                    yield
        while self.sequences:
            del self.sequences[-_DISMANTLED_SEQUENCES:]
            yield

    @property
    def empty(self) -> bool:
        """Whether it says nothing of any block."""
        return self == PoolReport(resets=self.resets, last_step=self.last_step)


def report_of(pool: Pool) -> PoolReport:
    """Describe a pool. Adopting the answer gives an equal pool."""
    state = pool.state
    return PoolReport(
        sequences=[_sequence_report(sequence) for sequence in state.sequences.values()],
        pins={pin: list(blocks) for pin, blocks in state.pins.items()},
        device=_tier_report(state.device),
        host=_tier_report(state.host),
        resets=state.resets,
        last_step=pool.last_step,
    )


def _sequence_report(sequence: Sequence) -> SequenceReport:
    return SequenceReport(
        sequence=sequence.id,
        group=sequence.group,
        request_id=sequence.request_id,
        salt=sequence.salt,
        resets=sequence.resets,
        block_ids=list(sequence.table),
        prompt_tokens=sequence.prompt,
        room_tokens=sequence.room,
        computed_tokens=sequence.computed,
        committed_blocks=sequence.committed,
        swapped=sequence.swapped,
    )


def _tier_report(tier: Tier) -> TierReport:
    withheld = [*tier.withheld(), *tier.condemned()]
    return TierReport(tier.sealing_order(), tier.unfindable(), tier.eviction_order(), withheld)


def adopt(spec: PoolSpec, report: PoolReport) -> Generator[None, None, Pool]:
    """Rebuild a pool from a report; the generator's return value is the pool.

    Raises InvalidReport, naming what contradicts itself, and leaves nothing behind.
    """
    state = PoolState(spec, Tier(spec.device_blocks, incomplete=True), Tier(spec.host_blocks, incomplete=True))
    pool = Pool(spec, state)
    check_numbers(report)
    for tier in (state.device, state.host):
        yield from tier.growing()
    state.resets, pool.last_step = report.resets, report.last_step
    if report.empty:
        yield from _fill_empty(state.device)
        yield from _fill_empty(state.host)
        return pool
    yield from _adopt_tier("device", state.device, report.device, _holders(report, swapped=False))
    yield from _adopt_tier("host", state.host, report.host, _holders(report, swapped=True))
    sharing = Sharing(state)
    for part in _slices(report.sequences):
        for sequence in part:
            sharing.add(_adopt_sequence(state, sequence))
        yield
    for pin, blocks in report.pins.items():
        if not all(state.device.key(block) for block in blocks):
            raise InvalidReport(f"pin {shortened(pin)!r} holds a block without a key")
        sharing.add_pin(pin, blocks)
        state.pins[pin] = list(blocks)
    return pool


def _fill_empty(tier: Tier) -> Iterator[None]:
    for part in _slices(range(1, tier.total + 1)):
        tier.put_back(part)
        yield


def _holders(report: PoolReport, *, swapped: bool) -> Iterator[int]:
    for sequence in report.sequences:
        if sequence.swapped == swapped:
            yield from sequence.block_ids
    if not swapped:
        for blocks in report.pins.values():
            yield from blocks


def _adopt_tier(name: str, tier: Tier, report: TierReport, holders: Iterable[int]) -> Iterator[None]:
    places = _Places(name, tier.total)
    for part in _slices(holders):
        places.take(part, again=True)
        tier.count_holders(part)
        yield
    for seals in _slices(report.keyed.items()):
        _adopt_keys(places, tier, seals, tier.seal)
        yield
    for seals in _slices(report.unfindable.items()):
        _adopt_keys(places, tier, seals, tier.seal_unfindable)
        if unheld := [block for block, _ in seals if not tier.count(block)]:
            raise InvalidReport(f"{name} block {unheld[0]} has a key that nobody finds, but is in no table")
        yield
    for part in _slices(report.release_order):
        places.take(part)
        tier.put_back(part)
        yield
    places.take_out(report.withheld, tier)
    if found := [block for block in report.withheld if tier.count(block) and block not in report.unfindable]:
        raise InvalidReport(f"{name} block {found[0]} is withheld once nobody holds it, but could be found till then")
    places.check_complete()


class _Places:
    """Sees to it that each block of a tier is in one place: in tables, in the release order, or withheld."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self._taken = bytearray(total + 1)
        self._count = 0

    def check_id(self, block: int) -> None:
        if not 1 <= block <= self.total:
            raise InvalidReport(f"{self.name} has no block {block}, it has {self.total}")

    def take(self, blocks: list[int], *, again: bool = False) -> None:
        """Note the place of blocks; only the tables may name one `again`."""
        for block in blocks:
            self.check_id(block)
            if not self._taken[block]:
                self._taken[block] = 1
                self._count += 1
            elif not again:
                raise InvalidReport(f"{self.name} block {block} is in two places")

    def take_out(self, blocks: list[int], tier: Tier) -> None:
        """Withhold blocks: those that tables name will be once nobody holds them."""
        for block in blocks:
            self.check_id(block)
        self.take([block for block in blocks if not tier.count(block)])
        tier.put_aside(blocks)

    def check_complete(self) -> None:
        if missing := self.total - self._count:
            raise InvalidReport(f"{self.name}: {missing} blocks are in no table and in no order")


def _adopt_keys(
    places: _Places, tier: Tier, seals: list[tuple[int, bytes]], seal: Callable[[int, bytes], None]
) -> None:
    for block, key in seals:
        places.check_id(block)
        if len(key) != KEY_BYTES or tier.key(block) is not None or (key == NO_KEY and seal == tier.seal):
            raise InvalidReport(f"{places.name} block {block} has two keys, or one that is none")
        seal(block, key)


def _adopt_sequence(state: PoolState, report: SequenceReport) -> Sequence:
    size, table = state.block_size, report.block_ids
    tier = state.host if report.swapped else state.device
    if report.sequence < 1 or report.sequence in state.sequences:
        raise InvalidReport(f"sequence {report.sequence} is listed twice, or is no id")
    if not 0 <= report.resets <= state.resets:
        raise InvalidReport(f"sequence {report.sequence} began after {report.resets} resets of {state.resets}")
    if not table or report.prompt_tokens < 0:
        raise InvalidReport(f"sequence {report.sequence} has no block, or {report.prompt_tokens} tokens of a prompt")
    if not (len(table) - 1) * size < report.room_tokens <= len(table) * size:
        raise InvalidReport(f"sequence {report.sequence} has {len(table)} blocks for {report.room_tokens} tokens")
    if not 0 <= report.computed_tokens <= report.room_tokens or len(set(table)) < len(table):
        raise InvalidReport(f"sequence {report.sequence} has a table that cannot be")
    if not 0 <= report.committed_blocks * size <= report.room_tokens or not all(
        tier.key(block) for block in table[: report.committed_blocks]
    ):
        raise InvalidReport(f"sequence {report.sequence}: a committed block has no key")
    sequence = Sequence(
        report.sequence,
        report.group,
        report.request_id,
        report.salt,
        report.resets,
        root_key(state.spec.model_fingerprint, report.salt, report.resets),
        list(table),
        report.prompt_tokens,
        report.room_tokens,
        report.computed_tokens,
        report.committed_blocks,
        swapped=report.swapped,
    )
    if report.committed_blocks:
        sequence.key = tier.key(table[report.committed_blocks - 1]) or sequence.root
    state.add(sequence)
    return sequence


def _slices(entries: "Iterable[_Entry]") -> "Iterator[list[_Entry]]":
    iterator = iter(entries)
    while part := list(islice(iterator, _SLICE)):
        yield part
