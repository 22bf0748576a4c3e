"""Between the engine's block operations and the wire of the KV manager."""

from collections.abc import Iterator
from itertools import starmap

from engine import blocks
from kvmanager import PoolSpec
from quire.v1 import kvmanager_pb2 as pb
from services.duration import duration

_FREE_REASONS = {reason: pb.FreeReason.Value(f"FREE_REASON_{reason.name}") for reason in blocks.FreeReason}


def register_message(spec: PoolSpec) -> pb.Register:
    """Write what an engine says of its pool."""
    return pb.Register(**vars(spec))


def step_message(step: blocks.Step) -> pb.PoolRequest:
    """Write a Step."""
    request = pb.PoolRequest()
    message = request.step  # written in place: a step of many sequences is mostly the cost of making its message
    message.step = step.step
    if step.lengths:
        sequences, tokens = zip(*step.lengths, strict=True)
        message.length_sequences.extend(sequences)
        message.length_tokens.extend(tokens)
    for sequence, first_index, token_ids in step.commits:
        message.commits.add(sequence=sequence, first_index=first_index, token_ids=token_ids)
    for sequence, reason, group in step.frees:
        message.frees.add(sequence=sequence, reason=_FREE_REASONS[reason], preempted_for_group=group)
    for group, rooms in step.extends:
        sequences, tokens = zip(*rooms, strict=True)
        message.extends.add(group=group, sequences=sequences, room_tokens=tokens)
    for allocate in step.allocates:
        fields = allocate._asdict()
        waited = duration(fields.pop("waited_seconds"))
        message.allocates.add(**fields, waited=waited)
    return request


def result_of(message: pb.StepResult) -> blocks.StepResult:
    """Read the answer to a Step."""
    return blocks.StepResult(
        step=message.step,
        refusals=[_refusal_of(refusal) for refusal in message.refusals],
        tables=[
            blocks.TableChange(
                change.sequence, change.first_index, list(change.block_ids), change.room_tokens, change.cached_tokens
            )
            for change in message.tables
        ],
        copies=list(_copies_of(message.device_to_device)),
        available_blocks=message.device.free + message.device.cached,
        device_to_host=tuple(_copies_of(message.device_to_host)),
        host_to_device=tuple(_copies_of(message.host_to_device)),
        withheld_blocks=list(message.withheld_blocks),
        host_withheld_blocks=list(message.host_withheld_blocks),
    )


def _copies_of(message: pb.CopyList) -> Iterator[blocks.Copy]:
    return starmap(blocks.Copy, zip(message.sources, message.destinations, strict=True))


def _refusal_of(message: pb.Refusal) -> blocks.Refusal:
    item = blocks.StepItem[pb.StepItem.Name(message.item).removeprefix("STEP_ITEM_")]
    return blocks.Refusal(item, message.index, message.detail)
