"""Checksums of operation records, and their replay.

A record contains a pool at the start of a session, and every block step applied to it since. Each block step has a
checksum of the record up to it: SHA-256 over the block steps and their results (ids, keys, copies, refusals, counts).
The same block steps always give the same results, so a replay with another checksum means that the core or the record
was changed. The hash covers the values, each list preceded by its length, and not their encoding in a file.
"""

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import chain
from struct import pack

from blocks import Pin, PinChange, Step, StepItem, Unpin, WindowKind
from kvmanager.adoption import adopt
from kvmanager.applied import AppliedStep
from kvmanager.errors import StepOutOfOrder
from kvmanager.parts import complete, parts_of
from kvmanager.pool import Pool
from kvmanager.pool_spec import PoolSpec
from kvmanager.report import PoolReport, TierReport

_SCHEME = b"quire-operations-v2"


# Device blocks and host blocks of a kind that an audit withheld.
Withheld = tuple[Sequence[int], Sequence[int]]


class ReplayMismatch(Exception):
    """A checksum differs from the record's, at block step `step`, or at the snapshot if `step` is None."""

    def __init__(self, message: str, step: int | None) -> None:
        super().__init__(message)
        self.step = step


class Checksum:
    """The checksum of one session's record: of its pool, then of each block step in order."""

    def __init__(self, spec: PoolSpec) -> None:
        """Start with the properties of the pool."""
        names = (spec.engine_id, spec.model_fingerprint, spec.model)
        sizes = (spec.incarnation, spec.block_size, spec.device_blocks, spec.host_blocks)
        self._hash = sha256(_SCHEME + b"".join(map(_text, names)) + _numbers(*sizes))
        for kind in spec.windows:
            self._hash.update(_kind(kind))
        if spec.windows:
            self._hash.update(_numbers(spec.retention_tokens))

    @property
    def digest(self) -> bytes:
        """The checksum of everything added so far."""
        return self._hash.digest()

    def adding(self, report: PoolReport) -> Iterator[None]:
        """Add the snapshot in slices, because a pool may be large."""
        for one in (report, *report.windows):
            for part in chain(_report_parts(one), _tier_parts(one.device), _tier_parts(one.host)):
                self._hash.update(part)
                yield

    def add(self, step: Step, applied: AppliedStep) -> None:
        """Add a block step and its result."""
        for part in chain(_step_parts(step), _applied_parts(applied)):
            self._hash.update(part)
        if applied.windows:
            self._add_windows(step, applied)
        for part in _condemn_parts(step):
            self._hash.update(part)

    def _add_windows(self, step: Step, applied: AppliedStep) -> None:
        """Add what only pools with window kinds have. Others keep the checksums that they had before."""
        self._hash.update(_rows(step.trims))
        for item in step.allocates:
            self._hash.update(_list(item.window_spares))
        for window in applied.windows:
            for part in chain(_applied_parts(window), _forgotten_parts(window)):
                self._hash.update(part)


class OperationsReplay:
    """Applies recorded block steps to a recorded pool. `steps` counts the applied block steps."""

    def __init__(self, spec: PoolSpec) -> None:
        """Start with an empty pool."""
        self.spec = spec
        self.pool = Pool(spec)
        self.steps = 0
        self._checksum = Checksum(spec)

    @property
    def checksum(self) -> str:
        """The checksum of the replay so far, as hexadecimal digits."""
        return self._checksum.digest.hex()

    def adopt(self, report: PoolReport, recorded: bytes) -> None:
        """Replace the pool by the snapshot. Raises ReplayMismatch and InvalidReport."""
        for _ in self._checksum.adding(report):
            pass
        if self._checksum.digest != recorded:
            raise ReplayMismatch("the snapshot or the pool in the header differs from the recorded checksum", None)
        self.pool = complete(adopt(self.spec, report))

    def apply(self, step: Step, withheld: Sequence[Withheld], recorded: bytes) -> None:
        """Withhold blocks of each kind, then apply a block step. Raises ReplayMismatch if the checksum differs."""
        for kind, (device, host) in enumerate(withheld):
            self.pool.withhold(device, host, kind)
        try:
            applied = self.pool.apply(step)
        except StepOutOfOrder as error:
            raise ReplayMismatch(f"step {step.step} is out of order: {error}", step.step) from error
        self._checksum.add(step, applied)
        if self._checksum.digest != recorded:
            raise ReplayMismatch(
                f"step {step.step} differs from the record: the core's result or the record's entry has changed",
                step.step,
            )
        self.steps += 1


# Encoding of the hashed values.


def _numbers(*values: int) -> bytes:
    return pack(f"<{len(values)}q", *values)


def _list(values: Collection[int]) -> bytes:
    return _numbers(len(values), *values)


def _rows(rows: Collection[Iterable[int]]) -> bytes:
    """Encode rows that all have the same number of columns."""
    return _numbers(len(rows), *chain.from_iterable(rows))


def _text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return _numbers(len(data)) + data


def _tokens(token_ids: Sequence[int]) -> bytes:
    """Encode tokens without their length, which is hashed before. An array of C ints is the fastest."""
    return (token_ids if isinstance(token_ids, array) else array("i", token_ids)).tobytes()


def _kind(kind: WindowKind) -> bytes:
    sizes = (kind.tokens, kind.chunked, kind.device_blocks, kind.host_blocks, kind.layers, kind.block_bytes)
    return _text(kind.name) + _numbers(*sizes)


def _forgotten_parts(window: AppliedStep) -> Iterator[bytes]:
    """Encode the blocks that left the window, with their sequence and first logical block."""
    for effect in window.effects:
        if effect[0] is StepItem.TRIM:
            yield _numbers(effect[1], effect[5]) + _list(effect[3])


def _report_parts(report: PoolReport) -> Iterator[bytes]:
    yield _numbers(report.resets, report.last_step, len(report.sequences), len(report.pins))
    for one in report.sequences:
        yield _numbers(one.sequence, one.group, one.resets, one.swapped)
        yield _numbers(one.prompt_tokens, one.room_tokens, one.computed_tokens, one.committed_blocks)
        yield _text(one.request_id) + _text(one.salt) + _list(one.block_ids)
        if one.retained or one.trimmed_to or one.dropped:
            yield _numbers(one.dropped, one.trimmed_to) + _list(one.retained)
    for pin, blocks in report.pins.items():
        yield _text(pin) + _list(blocks)


def _tier_parts(tier: TierReport) -> Iterator[bytes]:
    for keys in (tier.keyed, tier.unindexed):
        yield _numbers(len(keys))
        for seals in parts_of(keys.items()):
            yield _numbers(*(block for block, _ in seals)) + b"".join(key for _, key in seals)
    for blocks in (tier.release_order, tier.withheld):
        yield _numbers(len(blocks))
        for part in parts_of(blocks):
            yield _numbers(*part)


def _step_parts(step: Step) -> Iterator[bytes]:
    yield _numbers(step.step)
    yield _rows([(item.sequence, item.first_index, len(item.token_ids)) for item in step.commits])
    yield from (_tokens(item.token_ids) for item in step.commits)
    yield _numbers(len(step.pins))
    yield from map(_pin, step.pins)
    yield _rows(step.forks)
    yield _rows([(item.sequence, item.reason.value, item.preempted_for_group) for item in step.frees])
    yield _list(step.swap_outs) + _list(step.swap_ins)
    yield _rows([(item.group, len(item.rooms)) for item in step.extends])
    yield _rows([room for item in step.extends for room in item.rooms])
    yield _numbers(len(step.allocates))
    for item in step.allocates:
        yield _numbers(item.group, item.sequence, item.compute_tokens, item.spare_blocks, len(item.token_ids))
        yield _text(item.request_id) + _text(item.salt) + pack("<d", item.waited_seconds)
        yield _tokens(item.token_ids)
    yield _rows(step.lengths)


def _condemn_parts(step: Step) -> Iterator[bytes]:
    """Encode what few block steps have. Others keep the checksums that they had before."""
    for item in step.condemns:
        yield _numbers(item.sequence, item.reason.value, item.host, item.kind) + _list(item.blocks)


def _pin(item: PinChange) -> bytes:
    match item:
        case Pin():
            return b"p" + _text(item.pin_id) + _numbers(item.sequence, item.block_count)
        case Unpin():
            return b"u" + _text(item.pin_id)
        case _:
            return b"r"


def _applied_parts(applied: AppliedStep) -> Iterator[bytes]:
    result = applied.result
    yield _list(result.withheld_blocks) + _list(result.host_withheld_blocks)
    yield _rows([(refusal.item.value, refusal.position, refusal.reason.value) for refusal in result.refusals])
    yield _rows([(table[0], table[1], len(table.block_ids), table[3], table[4]) for table in result.tables])
    yield _numbers(*chain.from_iterable(table.block_ids for table in result.tables))
    yield _list(applied.sealed_blocks) + b"".join(applied.sealed_keys)
    yield _list([seal.block for seal in applied.host_sealed]) + b"".join(seal.key for seal in applied.host_sealed)
    yield _rows(result.device_to_host) + _rows(result.host_to_device) + _rows(result.copies)
    yield _numbers(*applied.device, *applied.host)
