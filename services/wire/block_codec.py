"""Between the engine's block operations and the wire of the KV manager."""

from collections.abc import Iterator, Sequence
from itertools import chain, starmap

from blocks import (
    Commit,
    Copy,
    Extend,
    FreeReason,
    Pin,
    PinChange,
    Refusal,
    Reset,
    Step,
    StepItem,
    StepRefusal,
    StepResult,
    TableChange,
    Unpin,
)
from quire.v1 import kvmanager_pb2 as pb
from services.wire.columns import parted
from services.wire.duration import duration

_FREE_REASONS = {reason: pb.FreeReason.Value(f"FREE_REASON_{reason.name}") for reason in FreeReason}


def step_message(step: Step) -> pb.PoolRequest:
    """Write a Step."""
    request = pb.PoolRequest()
    message = request.step  # written in place: a step of many sequences is mostly the cost of making its message
    message.step = step.step
    if step.lengths:
        sequences, tokens = zip(*step.lengths, strict=True)
        message.length_sequences.extend(sequences)
        message.length_tokens.extend(tokens)
    if step.commits:
        _write_commits(step.commits, message.commits)
    message.pins.extend(map(_pin_message, step.pins))
    for parent, child, length in step.forks:
        message.forks.add(parent=parent, child=child, length=length)
    for sequence, reason, group in step.frees:
        message.frees.add(sequence=sequence, reason=_FREE_REASONS[reason], preempted_for_group=group)
    message.swap_outs.extend(step.swap_outs)
    message.swap_ins.extend(step.swap_ins)
    if step.extends:
        _write_extends(step.extends, message.extends)
    for allocate in step.allocates:
        fields = allocate._asdict()
        waited = duration(fields.pop("waited_seconds"))
        message.allocates.add(**fields, waited=waited)
    return request


def _pin_message(change: PinChange) -> pb.PinChange:
    match change:
        case Pin():
            return pb.PinChange(pin=pb.Pin(**change._asdict()))
        case Unpin():
            return pb.PinChange(unpin=change.pin_id)
        case Reset():
            return pb.PinChange(reset=True)


def _write_commits(commits: Sequence[Commit], message: pb.Commits) -> None:
    sequences, first_indices, token_ids = zip(*commits, strict=True)
    message.sequences.extend(sequences)
    message.first_indices.extend(first_indices)
    message.token_counts.extend(map(len, token_ids))
    message.token_ids.extend(chain.from_iterable(token_ids))


def _write_extends(extends: Sequence[Extend], message: pb.Extends) -> None:
    groups, rooms = zip(*extends, strict=True)
    counts = list(map(len, rooms))
    pairs = list(chain.from_iterable(rooms))
    message.groups.extend(groups)
    message.sequences.extend([sequence for sequence, _ in pairs])
    message.room_tokens.extend([tokens for _, tokens in pairs])
    if set(counts) != {1}:
        message.sequence_counts.extend(counts)


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


def _tables_of(message: pb.TableChanges) -> tuple[TableChange, ...]:
    columns = (
        message.sequences[:],
        message.first_indices[:],
        parted(message.block_ids[:], message.block_counts[:], "result.tables"),
        message.room_tokens[:],
        message.cached_tokens[:],
    )
    return tuple(map(TableChange, *columns))


def _copies_of(message: pb.CopyList) -> Iterator[Copy]:
    return starmap(Copy, zip(message.sources, message.destinations, strict=True))


def _refusal_of(message: pb.Refusal) -> Refusal:
    item = StepItem[pb.StepItem.Name(message.item).removeprefix("STEP_ITEM_")]
    reason = StepRefusal[pb.StepRefusal.Name(message.reason).removeprefix("STEP_REFUSAL_")]
    return Refusal(item, message.index, reason, message.detail)
