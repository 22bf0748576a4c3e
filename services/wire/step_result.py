"""Answers to Steps: written by the KV manager in slices, and read by the engine."""

from collections.abc import Generator, Iterator, Sequence
from itertools import chain, starmap
from typing import TypeVar

from blocks import Copy, Refusal, StepItem, StepRefusal, StepResult, TableChange
from kvmanager import Applied, BlockCounts
from quire.v1 import kvmanager_pb2 as pb
from services.wire.columns import parted

ITEMS = {item: pb.StepItem.Value(f"STEP_ITEM_{item.name}") for item in StepItem}
REFUSALS = {refusal: pb.StepRefusal.Value(f"STEP_REFUSAL_{refusal.name}") for refusal in StepRefusal}
_ITEMS_OF: dict[int, StepItem] = {number: item for item, number in ITEMS.items()}
_REFUSALS_OF: dict[int, StepRefusal] = {number: refusal for refusal, number in REFUSALS.items()}

# What is written without a pause.
_ENTRIES = 4096
_REFUSALS_TOGETHER = 256
_TABLES = 256
# An answer has to reach its engine, however much of its Step was refused.
_LONGEST_DETAIL = 200

_Row = TypeVar("_Row")


def result_message(applied: Applied) -> Generator[None, None, pb.StepResult]:
    """Write the answer to a Step, in slices."""
    result = applied.result
    message = pb.StepResult(
        step=result.step,
        device=counts_message(applied.device),
        host=counts_message(applied.host),
        evicted_blocks=applied.evicted_blocks,
        withheld_blocks=result.withheld_blocks,
        host_withheld_blocks=result.host_withheld_blocks,
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
    yield from _write_refusals(result, message)
    for tables in _parts(result.tables, _TABLES):
        _write_tables(tables, message.tables)
        if len(tables) == _TABLES:
            yield
    yield from _write_copies(result, message)
    return message


def result_of(message: pb.StepResult) -> StepResult:
    """Read the answer to a Step."""
    return StepResult(
        step=message.step,
        refusals=tuple(map(_refusal_of, message.refusals)),
        tables=_tables_of(message.tables),
        copies=tuple(_copies_of(message.device_to_device)),
        available_blocks=message.device.free + message.device.cached,
        available_host_blocks=message.host.free + message.host.cached,
        device_to_host=tuple(_copies_of(message.device_to_host)),
        host_to_device=tuple(_copies_of(message.host_to_device)),
        withheld_blocks=tuple(message.withheld_blocks),
        host_withheld_blocks=tuple(message.host_withheld_blocks),
    )


def counts_message(counts: BlockCounts) -> pb.BlockCounts:
    """Write blocks by state."""
    return pb.BlockCounts(free=counts.free, cached=counts.cached, held=counts.held, withheld=counts.withheld)


def _write_refusals(result: StepResult, message: pb.StepResult) -> Generator[None, None, None]:
    for refusals in _parts(result.refusals, _REFUSALS_TOGETHER):
        for refusal in refusals:
            message.refusals.add(
                item=ITEMS[refusal.item],
                index=refusal.position,
                reason=REFUSALS[refusal.reason],
                detail=refusal.detail[:_LONGEST_DETAIL],
            )
        if len(refusals) == _REFUSALS_TOGETHER:
            yield


def _refusal_of(message: pb.Refusal) -> Refusal:
    # For the engine one reason is like another: one that it does not know is no reason to stop.
    reason = _REFUSALS_OF.get(message.reason, StepRefusal.INVALID)
    return Refusal(_ITEMS_OF[message.item], message.index, reason, message.detail)


def _write_copies(result: StepResult, message: pb.StepResult) -> Generator[None, None, None]:
    for copies, lists in (
        (result.device_to_host, message.device_to_host),
        (result.host_to_device, message.host_to_device),
        (result.copies, message.device_to_device),
    ):
        for some in _parts(copies, _ENTRIES):
            lists.sources.extend([copy.source for copy in some])
            lists.destinations.extend([copy.destination for copy in some])
            if len(some) == _ENTRIES:
                yield


def _copies_of(message: pb.CopyList) -> Iterator[Copy]:
    return starmap(Copy, zip(message.sources, message.destinations, strict=True))


def _parts(entries: Sequence[_Row], size: int) -> Iterator[Sequence[_Row]]:
    if len(entries) <= size:
        return iter((entries,) if entries else ())
    return (entries[start : start + size] for start in range(0, len(entries), size))


def _write_tables(tables: Sequence[TableChange], message: pb.TableChanges) -> None:
    sequences, first_indices, block_ids, rooms, cached = zip(*tables, strict=True)
    message.sequences.extend(sequences)
    message.first_indices.extend(first_indices)
    message.block_counts.extend(map(len, block_ids))
    message.room_tokens.extend(rooms)
    message.cached_tokens.extend(cached)
    message.block_ids.extend(chain.from_iterable(block_ids))


def _tables_of(message: pb.TableChanges) -> tuple[TableChange, ...]:
    columns = (
        message.sequences[:],
        message.first_indices[:],
        parted(message.block_ids[:], message.block_counts[:], "result.tables"),
        message.room_tokens[:],
        message.cached_tokens[:],
    )
    return tuple(map(TableChange, *columns))
