"""Between the wire and the plain values of the KV manager's core."""

from array import array
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Items
from itertools import chain
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration

from kvmanager import (
    Allocate,
    BlockCounts,
    BlockState,
    Commit,
    Extend,
    Fork,
    Free,
    FreeReason,
    Pin,
    PinChange,
    PoolSpec,
    Reset,
    Sequence,
    Session,
    Step,
    StepItem,
    StepRefusal,
    StepResult,
    TableChange,
    Tier,
    Unpin,
    limits,
    state_of,
)
from quire.v1 import kvmanager_pb2 as pb
from services.runtime.errors import InvalidField
from services.wire.columns import parted

_FREE_REASONS: dict[int, FreeReason] = {
    pb.FreeReason.Value(f"FREE_REASON_{reason.name}"): reason for reason in FreeReason
}

_STATES = {state: pb.BlockState.Value(f"BLOCK_STATE_{state.name}") for state in BlockState}

_ITEMS = {item: pb.StepItem.Value(f"STEP_ITEM_{item.name}") for item in StepItem}
_REFUSALS = {refusal: pb.StepRefusal.Value(f"STEP_REFUSAL_{refusal.name}") for refusal in StepRefusal}

# Of an answer, what is written without a pause.
_ENTRIES = 4096
_REFUSALS_TOGETHER = 256
_TABLES = 256
# An answer has to reach its engine, however much of its Step was refused.
_LONGEST_DETAIL = 200
# What is written of a page without a pause, and the entries of tables that one has.
_PAGE_BLOCKS = 2048
_PAGE_SEQUENCES = 64
_PAGE_ENTRIES = 65_536

_Row = TypeVar("_Row")
_Text = TypeVar("_Text", str, bytes)

LONGEST_SECONDS = 315_576_000_000  # of a Duration, as its documentation says


def spec_of(message: pb.Register) -> PoolSpec:
    """Read the pool that an engine describes. Raises InvalidRegistration."""
    return PoolSpec(
        engine_id=message.engine_id,
        incarnation=message.incarnation,
        model_fingerprint=message.model_fingerprint,
        block_size=message.block_size,
        device_blocks=message.device_blocks,
        host_blocks=message.host_blocks,
        model=message.model,
    )


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


def check_columns(field: str, *columns: Items[object]) -> None:
    """Raise InvalidField unless the columns of a table have one length."""
    if len(set(map(len, columns))) > 1:
        raise InvalidField(f"{field}: its arrays differ in length", field)


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


def short(value: _Text, most: int, field: str) -> _Text:
    """Return an id or a salt. Raises InvalidField for one that is longer than any gateway makes them."""
    if len(value) > most:
        raise InvalidField(f"{field} has {len(value)} characters, {most} at most", field)
    return value


def pairs(first: Items[int], second: Items[int], field: str) -> list[tuple[int, int]]:
    """Put two columns side by side. Raises InvalidField where they differ in length."""
    try:
        return list(zip(first[:], second[:], strict=True))
    except ValueError as error:
        raise InvalidField(f"{field}: its two arrays differ in length", field) from error


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
        waited_seconds=_seconds(item.waited, "step.allocates.waited"),
    )


def _seconds(value: Duration, field: str) -> float:
    if not 0 <= value.seconds <= LONGEST_SECONDS or not 0 <= value.nanos < 1_000_000_000:
        raise InvalidField(f"{field} is {value.seconds} s and {value.nanos} ns, which is no duration", field)
    return value.seconds + value.nanos / 1e9


def result_message(result: StepResult) -> Generator[None, None, pb.StepResult]:
    """Write the answer to a Step, in slices."""
    message = pb.StepResult(
        step=result.step,
        device=counts_message(result.device),
        host=counts_message(result.host),
        evicted_blocks=result.evicted_blocks,
        withheld_blocks=result.withheld,
        host_withheld_blocks=result.host_withheld,
    )
    for start in range(0, len(result.sealed_blocks), _ENTRIES):
        message.sealed_blocks.extend(result.sealed_blocks[start : start + _ENTRIES])
        if start:
            yield
    message.sealed_keys = b"".join(result.sealed_keys)
    for seals in _parts(result.host_sealed, _ENTRIES):
        message.host_sealed_blocks.extend([seal.block for seal in seals])
        if len(seals) == _ENTRIES:
            yield
    message.host_sealed_keys = b"".join([seal.key for seal in result.host_sealed])
    yield from _write_refusals(result, message)
    for tables in _parts(result.tables, _TABLES):
        _write_tables(tables, message.tables)
        if len(tables) == _TABLES:
            yield
    yield from _write_copies(result, message)
    return message


def _write_refusals(result: StepResult, message: pb.StepResult) -> Generator[None, None, None]:
    for refusals in _parts(result.refusals, _REFUSALS_TOGETHER):
        for refusal in refusals:
            message.refusals.add(
                item=_ITEMS[refusal.item],
                index=refusal.position,
                reason=_REFUSALS[refusal.reason],
                detail=refusal.detail[:_LONGEST_DETAIL],
            )
        if len(refusals) == _REFUSALS_TOGETHER:
            yield


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


def _parts(entries: list[_Row], size: int) -> Iterator[list[_Row]]:
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


def counts_message(counts: BlockCounts) -> pb.BlockCounts:
    """Write blocks by state."""
    return pb.BlockCounts(free=counts.free, cached=counts.cached, held=counts.held, withheld=counts.withheld)


def pool_message(session: Session) -> pb.PoolInfo:
    """Write a pool's counts and totals."""
    pool, totals = session.pool, session.totals
    return pb.PoolInfo(
        engine_id=pool.spec.engine_id,
        incarnation=pool.spec.incarnation,
        model_fingerprint=pool.spec.model_fingerprint,
        block_size=pool.spec.block_size,
        device_blocks=pool.spec.device_blocks,
        host_blocks=pool.spec.host_blocks,
        device=counts_message(pool.device.counts),
        host=counts_message(pool.host.counts),
        session=session.number,
        sequences=len(pool.sequences),
        groups=len(pool.groups),
        computed_tokens=pool.computed_tokens(),
        shared_blocks=pool.device.shared,
        saved_blocks=pool.device.saved,
        totals=pb.PoolTotals(**vars(totals) | {"refusals": totals.refusals.total()}),
        model=pool.spec.model,
    )


def sequences_message(
    found: Items[Sequence], size: int, block_size: int
) -> Generator[None, None, pb.ListSequencesResponse]:
    """Write a page of at most so many sequences with their tables, in slices; it ends early where tables are long."""
    page = pb.ListSequencesResponse()
    entries = written = 0
    for sequence in found[:size]:
        if written and entries + len(sequence.table) > _PAGE_ENTRIES:
            break
        page.sequences.add(
            sequence=sequence.id,
            group=sequence.group,
            request_id=sequence.request_id,
            block_ids=sequence.table,
            computed_tokens=sequence.computed,
            room_tokens=sequence.room,
            committed_tokens=sequence.committed * block_size,
        )
        entries, written = entries + len(sequence.table), written + 1
        if not written % _PAGE_SEQUENCES:
            yield
    if written < len(found):
        page.next_page_token = str(found[written - 1].id)
    return page


def block_map_message(tier: Tier, first: int, count: int) -> Generator[None, None, pb.GetBlockMapResponse]:
    """Write the states of `count` blocks from `first` on, or of as many as there are, in slices."""
    blocks = range(first, min(first + count, tier.total + 1))
    page = pb.GetBlockMapResponse(first_block=first, next_block=blocks.stop if blocks.stop <= tier.total else 0)
    for start in range(0, len(blocks), _PAGE_BLOCKS):
        if start:
            yield
        some = blocks[start : start + _PAGE_BLOCKS]
        page.states.extend([_STATES[state_of(tier, block)] for block in some])
        page.counts.extend([tier.count(block) for block in some])
    return page
