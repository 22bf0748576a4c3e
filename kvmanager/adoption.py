"""Adoption of a report: rebuilds a pool in slices, and refuses a state that no pool can have."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace

from blocks import KEY_BYTES, WindowKind, counted, root_key
from kvmanager.errors import InvalidReport
from kvmanager.parts import parts_of
from kvmanager.pool import Pool
from kvmanager.pool_spec import PoolSpec, truncated
from kvmanager.pool_state import PoolState, SequenceTable, differences
from kvmanager.report import PoolReport, SequenceReport, TierReport
from kvmanager.tier.key_index import NO_KEY
from kvmanager.tier.tier import Tier

# Entries that are processed without a pause: well below a millisecond.
_SLICE = 1000


def adopt(spec: PoolSpec, report: PoolReport) -> Generator[None, None, Pool]:
    """Rebuild a pool from a report; the generator's return value is the pool.

    Raises InvalidReport, which names the contradiction.
    """
    windows = [_incomplete(spec.of(kind), kind) for kind in spec.windows]
    state = _incomplete(spec, None, windows)
    pool = Pool(spec, state)
    pool.last_step = report.last_step
    if len(report.windows) != (0 if report.empty else len(windows)):
        raise InvalidReport(f"kinds must be {len(windows) + 1}, not {len(report.windows) + 1}")
    yield from _adopting_kind(state, report, None)
    for window, own in zip(windows, report.windows or [replace(report) for _ in windows], strict=True):
        if own.last_step != report.last_step:
            raise InvalidReport(
                f"kind {window.kind_name}: last_applied_step must be that of kind 0, {report.last_step}, "
                f"not {own.last_step}"
            )
        yield from _adopting_kind(window, own, state)
        if faults := differences(state, window):
            raise InvalidReport(f"kind {window.kind_name}: {faults[0]}")
    return pool


def _incomplete(spec: PoolSpec, kind: WindowKind | None, windows: Sequence[PoolState] = ()) -> PoolState:
    device, host = Tier(spec.device_blocks, incomplete=True), Tier(spec.host_blocks, incomplete=True)
    return PoolState(spec, device, host, windows, kind)


def _adopting_kind(state: PoolState, report: PoolReport, main: PoolState | None) -> Iterator[None]:
    """Rebuild the state of a kind; `main` is that of kind 0 for a window kind."""
    _check_numbers(report)
    if main is not None and report.resets != main.resets:
        raise InvalidReport(
            f"kind {state.kind_name}: resets must be those of kind 0, {main.resets}, not {report.resets}"
        )
    for tier in (state.device, state.host):
        yield from tier.growing()
    state.resets = report.resets
    if report.empty:
        yield from _fill_empty(state.device)
        yield from _fill_empty(state.host)
        return
    yield from _adopt_tier("device", state.device, report.device, _holders(report, swapped=False))
    yield from _adopt_tier("host", state.host, report.host, _holders(report, swapped=True))
    sharing = _SharingCheck(state)
    for part in parts_of(report.sequences, _SLICE):
        for sequence in part:
            sharing.check_sequence(_adopt_sequence(state, sequence, main))
        yield
    for pin, blocks in report.pins.items():
        if not all(state.device.key(block) for block in blocks):
            raise InvalidReport(f"pin {truncated(pin)!r} holds a block without a key")
        sharing.check_pin(pin, blocks)
        state.pins[pin] = list(blocks)


def _fill_empty(tier: Tier) -> Iterator[None]:
    for part in parts_of(range(1, tier.total + 1), _SLICE):
        tier.enqueue(part)
        yield


def _holders(report: PoolReport, *, swapped: bool) -> Iterator[int]:
    for sequence in report.sequences:
        if sequence.swapped == swapped:
            yield from sequence.block_ids
    if not swapped:
        for blocks in report.pins.values():
            yield from blocks


def _adopt_tier(name: str, tier: Tier, report: TierReport, holders: Iterable[int]) -> Iterator[None]:
    states = _StateCheck(name, tier.total)
    for part in parts_of(holders, _SLICE):
        states.add(part, repeated=True)
        tier.add_holders(part)
        yield
    for seals in parts_of(report.keyed.items(), _SLICE):
        _adopt_keys(states, tier, seals, tier.keys.seal)
        yield
    for seals in parts_of(report.unindexed.items(), _SLICE):
        _adopt_keys(states, tier, seals, tier.keys.seal_unindexed)
        if unheld := [block for block, _ in seals if not tier.ref_count(block)]:
            raise InvalidReport(f"{name} block {unheld[0]} is listed as unindexed, but is in no table")
        yield
    for part in parts_of(report.release_order, _SLICE):
        states.add(part)
        tier.enqueue(part)
        yield
    states.add_withheld(report.withheld, tier)
    if found := [block for block in report.withheld if tier.ref_count(block) and block not in report.unindexed]:
        raise InvalidReport(f"{name} block {found[0]} is to be withheld on release, but is not listed as unindexed")
    states.check_complete()
    for part in parts_of(report.outlived, _SLICE):
        _adopt_outlived(states, tier, part)
        yield


def _adopt_outlived(states: "_StateCheck", tier: Tier, blocks: list[int]) -> None:
    for block in blocks:
        states.check_id(block)
        if tier.key(block) is None:
            raise InvalidReport(f"{states.name} block {block} is listed as outlived, but has no key")
    tier.keys.outlived.update(blocks)


class _StateCheck:
    """Checks that each block of a tier has one state: in tables, in the release order, or withheld."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self._seen = bytearray(total + 1)
        self._count = 0

    def check_id(self, block: int) -> None:
        if not 1 <= block <= self.total:
            raise InvalidReport(f"{self.name} block must be between 1 and {self.total}, not {block}")

    def add(self, blocks: list[int], *, repeated: bool = False) -> None:
        """Record that blocks have a state. Only tables may list a block repeatedly."""
        for block in blocks:
            self.check_id(block)
            if not self._seen[block]:
                self._seen[block] = 1
                self._count += 1
            elif not repeated:
                raise InvalidReport(f"{self.name} block {block} is listed in two states")

    def add_withheld(self, blocks: list[int], tier: Tier) -> None:
        """Withhold blocks, those in tables on release."""
        for block in blocks:
            self.check_id(block)
        self.add([block for block in blocks if not tier.ref_count(block)])
        for block in blocks:
            tier.withhold_unqueued(block, tier.ref_count(block))

    def check_complete(self) -> None:
        if missing := self.total - self._count:
            raise InvalidReport(f"{self.name}: {counted(missing, 'block')} missing from tables and release order")


def _adopt_keys(
    states: _StateCheck, tier: Tier, seals: list[tuple[int, bytes]], seal: Callable[[int, bytes], None]
) -> None:
    for block, key in seals:
        states.check_id(block)
        if len(key) != KEY_BYTES or tier.key(block) is not None or (key == NO_KEY and seal == tier.keys.seal):
            raise InvalidReport(f"{states.name} block {block} has two keys, or an invalid one")
        seal(block, key)


def _adopt_sequence(state: PoolState, report: SequenceReport, main: PoolState | None) -> SequenceTable:
    size, table = state.block_size, report.block_ids
    blocks, committed = report.dropped + len(table), max(0, report.committed_blocks - report.dropped)
    tier = state.host if report.swapped else state.device
    if report.sequence < 1 or report.sequence in state.sequences:
        raise InvalidReport(f"sequence {report.sequence} is listed twice, or is not a valid id")
    if not 0 <= report.resets <= state.resets:
        raise InvalidReport(
            f"sequence {report.sequence}: resets must be between 0 and {state.resets}, not {report.resets}"
        )
    _check_places(state, report, blocks)
    if not (blocks - 1) * size < report.room_tokens <= blocks * size:
        raise InvalidReport(f"sequence {report.sequence} has {blocks} blocks for {report.room_tokens} tokens")
    if not 0 <= report.computed_tokens <= report.room_tokens or len(set(table)) < len(table):
        raise InvalidReport(
            f"sequence {report.sequence} has {report.computed_tokens} of {report.room_tokens} tokens computed, "
            "or a block twice"
        )
    if not 0 <= report.committed_blocks * size <= report.room_tokens or not all(
        tier.key(block) for block in table[:committed]
    ):
        raise InvalidReport(f"sequence {report.sequence}: a committed block has no key")
    sequence = SequenceTable(
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
        dropped=report.dropped,
        trimmed_to=report.trimmed_to,
        retained=report.retained,
    )
    if committed:
        sequence.last_key = tier.key(table[committed - 1]) or sequence.root
    elif report.committed_blocks and main and report.sequence in main.sequences:
        sequence.last_key = main.sequences[report.sequence].last_key
    state.add(sequence)
    return sequence


def _check_places(state: PoolState, report: SequenceReport, blocks: int) -> None:
    """Check where a sequence's blocks are, and where later prompts may continue."""
    if not _has_left_window(state, report):
        raise InvalidReport(f"sequence {report.sequence} lacks blocks of its window, or has some that have left it")
    if not blocks or report.prompt_tokens < 0:
        why = "no blocks" if not blocks else f"{report.prompt_tokens} prompt tokens"
        raise InvalidReport(f"sequence {report.sequence} has {why}")
    whole = report.prompt_tokens // state.block_size
    if not all(0 <= boundary <= whole for boundary in report.retained):
        raise InvalidReport(
            f"sequence {report.sequence}: retained must be between 0 and {whole}, the whole blocks of its prompt"
        )


def _has_left_window(state: PoolState, report: SequenceReport) -> bool:
    """Return whether exactly the blocks that no later query sees are missing."""
    if state.kind is None:
        return not report.dropped
    position = report.trimmed_to
    return 0 <= position <= report.room_tokens and report.dropped == state.kind.first_block(position, state.block_size)


def _check_numbers(report: PoolReport) -> None:
    if report.resets < 0:
        raise InvalidReport(f"resets must be at least 0, not {report.resets}")
    if report.last_step < 0:
        raise InvalidReport(f"last_applied_step must be at least 0, not {report.last_step}")
    for name, tier in (("device", report.device), ("host", report.host)):
        _check_tier(name, tier)


def _check_tier(name: str, tier: TierReport) -> None:
    withheld = set(tier.withheld)
    if len(withheld) < len(tier.withheld):
        raise InvalidReport(f"{name}: a withheld block is listed twice")
    if block := next((block for block in tier.withheld if block in tier.keyed), 0):
        raise InvalidReport(f"{name} block {block} is withheld, but is indexed under a key")


class _SharingCheck:
    """Checks that tables and pins share a block only at the same index, and an unkeyed one only in one group."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._first: dict[tuple[bool, int], tuple[int, int]] = {}  # index and group of shared blocks

    def check_sequence(self, sequence: SequenceTable) -> None:
        first = self._state.sequences[next(iter(self._state.groups[sequence.group]))]
        own, others = (
            (one.request_id, one.salt, one.resets, one.prompt_tokens, one.swapped) for one in (sequence, first)
        )
        if own != others:
            raise InvalidReport(f"group {sequence.group} has sequences of different requests, or is partly swapped out")
        tier = self._state.host if sequence.swapped else self._state.device
        self._check(tier, sequence.table, sequence.group, f"sequence {sequence.id}", sequence.dropped)

    def check_pin(self, pin: str, blocks: list[int]) -> None:
        if not pin or (not blocks and self._state.kind is None) or len(set(blocks)) < len(blocks):
            raise InvalidReport(f"pin {truncated(pin)!r} has no name, no blocks, or a block twice")
        if self._state.kind is None:  # what a pin holds of a window kind begins anywhere
            self._check(self._state.device, blocks, 0, f"pin {truncated(pin)!r}", 0)

    def _check(self, tier: Tier, blocks: list[int], group: int, name: str, dropped: int) -> None:
        host = tier is self._state.host
        for index, block in enumerate(blocks, dropped):
            if tier.ref_count(block) > 1:
                first_index, first_group = self._first.setdefault((host, block), (index, group))
                if first_index != index:
                    raise InvalidReport(f"{name} has block {block} at index {index}, another holder at {first_index}")
                if first_group != group and tier.key(block) is None:
                    raise InvalidReport(f"{name} shares block {block}, which has no key, with another group")
