"""Answers to block steps: written by the KV manager in slices, read by the engine."""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import chain, starmap
from typing import TypeVar

from blocks import Copy, Refusal, StepItem, StepRefusal, StepResult, TableChange
from kvmanager import AppliedStep, BlockCounts
from quire.v1 import kvmanager_pb2 as pb
from services.wire.columns import split_by_counts

ITEMS = {item: pb.StepItem.Value(f"STEP_ITEM_{item.name}") for item in StepItem}
REFUSALS = {refusal: pb.StepRefusal.Value(f"STEP_REFUSAL_{refusal.name}") for refusal in StepRefusal}
_ITEMS_OF: dict[int, StepItem] = {number: item for item, number in ITEMS.items()}
_REFUSALS_OF: dict[int, StepRefusal] = {number: refusal for refusal, number in REFUSALS.items()}

# Entries written without a pause.
_ENTRIES = 4096
_REFUSALS_TOGETHER = 256
_TABLES = 256
# Limits the answer's size, because the engine must receive it even if most of its block step was refused.
_MAX_DETAIL_LENGTH = 200

_COPIES = ("device_to_host", "host_to_device", "device_to_device")

_Row = TypeVar("_Row")


def result_message(applied: AppliedStep) -> Generator[None, None, pb.StepResult]:
    """Write the answer to a block step, in slices."""
    message = yield from _kind_message(applied)
    for window in applied.windows:
        message.windows.append((yield from _kind_message(window)))
    return message


def _kind_message(applied: AppliedStep) -> Generator[None, None, pb.StepResult]:
    result = applied.result
    message = pb.StepResult(
        step=result.step,
        device=counts_message(applied.device),
        host=counts_message(applied.host),
        evicted_blocks=applied.evicted_blocks,
        withheld_blocks=result.withheld_blocks,
        host_withheld_blocks=result.host_withheld_blocks,
    )
    # Empty parts are skipped, because most parts of an answer are empty.
    if applied.sealed_blocks:
        message.sealed_keys = b"".join(applied.sealed_keys)
        yield from _in_parts(applied.sealed_blocks, _ENTRIES, message.sealed_blocks.extend)
    if applied.host_sealed:
        message.host_sealed_keys = b"".join([seal.key for seal in applied.host_sealed])
        yield from _in_parts(
            applied.host_sealed,
            _ENTRIES,
            lambda seals: message.host_sealed_blocks.extend([block for block, _ in seals]),
        )
    if result.refusals:
        yield from _in_parts(result.refusals, _REFUSALS_TOGETHER, partial(_write_refusals, message))
    if result.tables:
        yield from _in_parts(result.tables, _TABLES, partial(_write_tables, message.tables))
    for name, copies in zip(_COPIES, (result.device_to_host, result.host_to_device, result.copies), strict=True):
        if copies:
            yield from _in_parts(copies, _ENTRIES, partial(_write_copies, getattr(message, name)))
    return message


def result_of(message: pb.StepResult) -> StepResult:
    """Read the answer to a block step."""
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
        windows=tuple(map(result_of, message.windows)) if message.windows else (),
    )


def counts_message(counts: BlockCounts) -> pb.BlockCounts:
    """Write blocks by state."""
    return pb.BlockCounts(free=counts.free, cached=counts.cached, held=counts.held, withheld=counts.withheld)


def _in_parts(
    entries: Sequence[_Row], size: int, write: Callable[[Sequence[_Row]], object]
) -> Generator[None, None, None]:
    """Write entries in parts, with a pause between two parts."""
    for start in range(0, len(entries), size):
        if start:
            yield
        write(entries[start : start + size])


def _write_refusals(message: pb.StepResult, refusals: Sequence[Refusal]) -> None:
    for item, position, reason, detail in refusals:
        detail = detail[:_MAX_DETAIL_LENGTH]
        message.refusals.add(item=ITEMS[item], index=position, reason=REFUSALS[reason], detail=detail)


def _refusal_of(message: pb.Refusal) -> Refusal:
    # The engine treats all reasons alike, so an unknown reason must not stop it.
    reason = _REFUSALS_OF.get(message.reason, StepRefusal.INVALID)
    return Refusal(_ITEMS_OF[message.item], message.index, reason, message.detail)


def _write_copies(message: pb.CopyList, copies: Sequence[Copy]) -> None:
    message.sources.extend([copy.source for copy in copies])
    message.destinations.extend([copy.destination for copy in copies])


def _copies_of(message: pb.CopyList) -> Iterator[Copy]:
    return starmap(Copy, zip(message.sources, message.destinations, strict=True))


def _write_tables(message: pb.TableChanges, tables: Sequence[TableChange]) -> None:
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
        split_by_counts(message.block_ids[:], message.block_counts[:], "result.tables"),
        message.room_tokens[:],
        message.cached_tokens[:],
    )
    return tuple(map(TableChange, *columns))
