"""Between the engine's block operations and the wire of the KV manager."""

from engine import blocks
from kvmanager import PoolSpec
from quire.v1 import kvmanager_pb2 as pb
from services.duration import duration


def register_message(spec: PoolSpec) -> pb.Register:
    """Write what an engine says of its pool."""
    return pb.Register(**vars(spec))


def step_message(step: blocks.Step) -> pb.PoolRequest:
    """Write a Step."""
    message = pb.Step(
        step=step.step,
        length_sequences=[length.sequence for length in step.lengths],
        length_tokens=[length.tokens for length in step.lengths],
    )
    for commit in step.commits:
        message.commits.add(**commit._asdict())
    for free in step.frees:
        message.frees.add(
            sequence=free.sequence,
            reason=pb.FreeReason.Value(f"FREE_REASON_{free.reason.name}"),
            preempted_for_group=free.preempted_for_group,
        )
    for extend in step.extends:
        message.extends.add(
            group=extend.group,
            sequences=[sequence for sequence, _ in extend.rooms],
            room_tokens=[room for _, room in extend.rooms],
        )
    for allocate in step.allocates:
        fields = allocate._asdict()
        waited = duration(fields.pop("waited_seconds"))
        message.allocates.add(**fields, waited=waited)
    return pb.PoolRequest(step=message)


def result_of(message: pb.StepResult) -> blocks.StepResult:
    """Read the answer to a Step."""
    copies = message.device_to_device
    return blocks.StepResult(
        step=message.step,
        refusals=[_refusal_of(refusal) for refusal in message.refusals],
        tables=[
            blocks.TableChange(
                change.sequence, change.first_index, list(change.block_ids), change.room_tokens, change.cached_tokens
            )
            for change in message.tables
        ],
        copies=[blocks.Copy(*pair) for pair in zip(copies.sources, copies.destinations, strict=True)],
        available_blocks=message.device.free + message.device.cached,
    )


def _refusal_of(message: pb.Refusal) -> blocks.Refusal:
    item = blocks.StepItem[pb.StepItem.Name(message.item).removeprefix("STEP_ITEM_")]
    return blocks.Refusal(item, message.index, message.detail)
