"""Between the engine's block operations and the wire of the KV manager."""

from collections.abc import Iterator, Sequence
from itertools import chain, starmap

from engine import blocks
from quire.v1 import kvmanager_pb2 as pb
from services.wire.columns import parted
from services.wire.duration import duration

_FREE_REASONS = {reason: pb.FreeReason.Value(f"FREE_REASON_{reason.name}") for reason in blocks.FreeReason}


def step_message(step: blocks.Step) -> pb.PoolRequest:
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


def _pin_message(change: blocks.PinChange) -> pb.PinChange:
    match change:
        case blocks.Pin():
            return pb.PinChange(pin=pb.Pin(**change._asdict()))
        case blocks.Unpin():
            return pb.PinChange(unpin=change.pin_id)
        case blocks.Reset():
            return pb.PinChange(reset=True)


def _write_commits(commits: Sequence[blocks.Commit], message: pb.Commits) -> None:
    sequences, first_indices, token_ids = zip(*commits, strict=True)
    message.sequences.extend(sequences)
    message.first_indices.extend(first_indices)
    message.token_counts.extend(map(len, token_ids))
    message.token_ids.extend(chain.from_iterable(token_ids))


def _write_extends(extends: Sequence[blocks.Extend], message: pb.Extends) -> None:
    groups, rooms = zip(*extends, strict=True)
    counts = list(map(len, rooms))
    pairs = list(chain.from_iterable(rooms))
    message.groups.extend(groups)
    message.sequences.extend([sequence for sequence, _ in pairs])
    message.room_tokens.extend([tokens for _, tokens in pairs])
    if set(counts) != {1}:
        message.sequence_counts.extend(counts)


def result_of(message: pb.StepResult) -> blocks.StepResult:
    """Read the answer to a Step."""
    return blocks.StepResult(
        step=message.step,
        refusals=[_refusal_of(refusal) for refusal in message.refusals],
        tables=_tables_of(message.tables),
        copies=list(_copies_of(message.device_to_device)),
        available_blocks=message.device.free + message.device.cached,
        available_host_blocks=message.host.free + message.host.cached,
        device_to_host=tuple(_copies_of(message.device_to_host)),
        host_to_device=tuple(_copies_of(message.host_to_device)),
        withheld_blocks=list(message.withheld_blocks),
        host_withheld_blocks=list(message.host_withheld_blocks),
    )


def _tables_of(message: pb.TableChanges) -> list[blocks.TableChange]:
    columns = (
        message.sequences[:],
        message.first_indices[:],
        parted(message.block_ids[:], message.block_counts[:], "result.tables"),
        message.room_tokens[:],
        message.cached_tokens[:],
    )
    return list(map(blocks.TableChange, *columns))


def _copies_of(message: pb.CopyList) -> Iterator[blocks.Copy]:
    return starmap(blocks.Copy, zip(message.sources, message.destinations, strict=True))


def _refusal_of(message: pb.Refusal) -> blocks.Refusal:
    item = blocks.StepItem[pb.StepItem.Name(message.item).removeprefix("STEP_ITEM_")]
    return blocks.Refusal(item, message.index, message.detail)
