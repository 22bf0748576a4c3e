"""Between the wire and the plain values of the KV manager's core."""

from array import array
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Items
from itertools import chain
from typing import TypeVar

from blocks import (
    Allocate,
    Commit,
    Extend,
    Fork,
    Free,
    FreeReason,
    Pin,
    PinChange,
    Reset,
    Step,
    StepItem,
    StepRefusal,
    TableChange,
    Unpin,
)
from kvmanager import Applied, limits
from quire.v1 import kvmanager_pb2 as pb
from services.runtime.errors import InvalidField
from services.wire.columns import check_columns, pairs, parted
from services.wire.duration import checked_seconds_of
from services.wire.pool import counts_message
from services.wire.wire_fields import short

_FREE_REASONS: dict[int, FreeReason] = {
    pb.FreeReason.Value(f"FREE_REASON_{reason.name}"): reason for reason in FreeReason
}

_ITEMS = {item: pb.StepItem.Value(f"STEP_ITEM_{item.name}") for item in StepItem}
_REFUSALS = {refusal: pb.StepRefusal.Value(f"STEP_REFUSAL_{refusal.name}") for refusal in StepRefusal}

# Of an answer, what is written without a pause.
_ENTRIES = 4096
_REFUSALS_TOGETHER = 256
_TABLES = 256
# An answer has to reach its engine, however much of its Step was refused.
_LONGEST_DETAIL = 200

_Row = TypeVar("_Row")


def step_of(message: pb.Step) -> Step:
    """Read a Step. Raises InvalidField where it makes no sense at all."""
    return Step(
        step=message.step,
        commits=_commits(message.commits) if message.HasField("commits") else (),
        pins=[_pin_change(item) for item in message.pins],
        forks=[Fork(item.parent, item.child, item.length) for item in message.forks],
        frees=[Free(item.sequence, _free_reason(item.reason), item.preempted_for_group) for item in message.frees],
        swap_outs=list(message.swap_outs),
        swap_ins=list(message.swap_ins),
        extends=_extends(message.extends) if message.HasField("extends") else (),
        allocates=[allocate_of(item) for item in message.allocates],
        lengths=pairs(message.length_sequences, message.length_tokens, "step.lengths"),
    )


# Columns are read as slices, because going through a repeated field one by one takes several times as long.


def _commits(message: pb.Commits) -> list[Commit]:
    token_ids = parted(array("i", message.token_ids[:]), message.token_counts[:], "step.commits")
    return _rows(Commit, "step.commits", message.sequences[:], message.first_indices[:], token_ids)


def _extends(message: pb.Extends) -> list[Extend]:
    rooms = pairs(message.sequences, message.room_tokens, "step.extends")
    counts = message.sequence_counts[:]
    if counts:
        return _rows(Extend, "step.extends", message.groups[:], parted(rooms, counts, "step.extends"))
    return _rows(Extend, "step.extends", message.groups[:], [(room,) for room in rooms])


def _rows(make: Callable[..., _Row], field: str, *columns: Items[object]) -> list[_Row]:
    check_columns(field, *columns)
    return list(map(make, *columns))


def _pin_change(item: pb.PinChange) -> PinChange:
    match item.WhichOneof("kind"):
        case "pin":
            return Pin(_pin_id(item.pin.pin_id), item.pin.sequence, item.pin.block_count)
        case "unpin":
            return Unpin(_pin_id(item.unpin))
        case "reset":
            return Reset()
        case _:
            raise InvalidField("step.pins has an empty entry", "step.pins")


def _pin_id(value: str) -> str:
    return short(value, limits.LONGEST_PIN_ID, "step.pins.pin_id")


def _free_reason(value: int) -> FreeReason:
    if value not in _FREE_REASONS:
        raise InvalidField(f"step.frees.reason is {value}, which is not a reason", "step.frees.reason")
    return _FREE_REASONS[value]


def allocate_of(item: pb.Allocate) -> Allocate:
    """Read an allocate. Raises InvalidField for texts that are too long, and a time that is none."""
    short(item.trace_parent, limits.LONGEST_ID, "step.allocates.trace_parent")
    return Allocate(
        group=item.group,
        sequence=item.sequence,
        request_id=short(item.request_id, limits.LONGEST_ID, "step.allocates.request_id"),
        salt=short(item.salt, limits.LONGEST_SALT, "step.allocates.salt"),
        token_ids=array("i", item.token_ids),
        compute_tokens=item.compute_tokens,
        spare_blocks=item.spare_blocks,
        waited_seconds=checked_seconds_of(item.waited, "step.allocates.waited"),
    )


def result_message(applied: Applied) -> Generator[None, None, pb.StepResult]:
    """Write the answer to a Step, in slices."""
    message = pb.StepResult(
        step=applied.result.step,
        device=counts_message(applied.device),
        host=counts_message(applied.host),
        evicted_blocks=applied.evicted_blocks,
        withheld_blocks=applied.result.withheld_blocks,
        host_withheld_blocks=applied.result.host_withheld_blocks,
    )
    for start in range(0, len(applied.sealed_blocks), _ENTRIES):
        message.sealed_blocks.extend(applied.sealed_blocks[start : start + _ENTRIES])
        if start:
            yield
    message.sealed_keys = b"".join(applied.sealed_keys)
    for seals in _parts(applied.host_sealed, _ENTRIES):
        message.host_sealed_blocks.extend([seal.block for seal in seals])
        if len(seals) == _ENTRIES:
            yield
    message.host_sealed_keys = b"".join([seal.key for seal in applied.host_sealed])
    yield from _write_refusals(applied, message)
    for tables in _parts(applied.result.tables, _TABLES):
        _write_tables(tables, message.tables)
        if len(tables) == _TABLES:
            yield
    yield from _write_copies(applied, message)
    return message


def _write_refusals(applied: Applied, message: pb.StepResult) -> Generator[None, None, None]:
    for refusals in _parts(applied.result.refusals, _REFUSALS_TOGETHER):
        for refusal in refusals:
            message.refusals.add(
                item=_ITEMS[refusal.item],
                index=refusal.position,
                reason=_REFUSALS[refusal.reason],
                detail=refusal.detail[:_LONGEST_DETAIL],
            )
        if len(refusals) == _REFUSALS_TOGETHER:
            yield


def _write_copies(applied: Applied, message: pb.StepResult) -> Generator[None, None, None]:
    for copies, lists in (
        (applied.result.device_to_host, message.device_to_host),
        (applied.result.host_to_device, message.host_to_device),
        (applied.result.copies, message.device_to_device),
    ):
        for some in _parts(copies, _ENTRIES):
            lists.sources.extend([copy.source for copy in some])
            lists.destinations.extend([copy.destination for copy in some])
            if len(some) == _ENTRIES:
                yield


def _parts(entries: Items[_Row], size: int) -> Iterator[Items[_Row]]:
    if len(entries) <= size:
        return iter((entries,) if entries else ())
    return (entries[start : start + size] for start in range(0, len(entries), size))


def _write_tables(tables: Items[TableChange], message: pb.TableChanges) -> None:
    sequences, first_indices, block_ids, rooms, cached = zip(*tables, strict=True)
    message.sequences.extend(sequences)
    message.first_indices.extend(first_indices)
    message.block_counts.extend(map(len, block_ids))
    message.room_tokens.extend(rooms)
    message.cached_tokens.extend(cached)
    message.block_ids.extend(chain.from_iterable(block_ids))
