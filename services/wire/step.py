"""Block steps, written for streams and records, and read from messages; `step_reader` reads untrusted bytes."""

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

from blocks import (
    Allocate,
    Commit,
    Condemn,
    CondemnReason,
    Extend,
    Fork,
    Free,
    FreeReason,
    Pin,
    PinChange,
    Reset,
    Step,
    Trim,
    Unpin,
)
from kvmanager import limits
from quire.v1 import kvmanager_pb2 as pb
from services.runtime.errors import InvalidField
from services.wire.columns import check_columns, pairs, split_by_counts
from services.wire.duration import checked_seconds_of, duration
from services.wire.wire_fields import check_length

FREE_REASONS = {reason: pb.FreeReason.Value(f"FREE_REASON_{reason.name}") for reason in FreeReason}
_REASONS_OF: dict[int, FreeReason] = {number: reason for reason, number in FREE_REASONS.items()}
CONDEMN_REASONS = {reason: pb.CondemnReason.Value(f"CONDEMN_REASON_{reason.name}") for reason in CondemnReason}
_CONDEMN_REASONS_OF: dict[int, CondemnReason] = {number: reason for reason, number in CONDEMN_REASONS.items()}
_IN_HOST: dict[int, bool] = {pb.TIER_UNSPECIFIED: False, pb.TIER_DEVICE: False, pb.TIER_HOST: True}

_Row = TypeVar("_Row")


def step_message(step: Step) -> pb.PoolRequest:
    """Write a block step as a message of an Attach stream."""
    request = pb.PoolRequest()
    write_step(step, request.step)  # in place, because copying a large message costs more than writing it
    return request


def write_step(step: Step, message: pb.Step) -> None:
    """Write a block step into an empty message."""
    message.step = step.step
    if step.lengths:
        sequences, tokens = zip(*step.lengths, strict=True)
        message.length_sequences.extend(sequences)
        message.length_tokens.extend(tokens)
    if step.condemns:
        _write_condemns(step.condemns, message.condemns)
    if step.commits:
        _write_commits(step.commits, message.commits)
    if step.trims:
        sequences, positions = zip(*step.trims, strict=True)
        message.trims.sequences.extend(sequences)
        message.trims.positions.extend(positions)
    message.pins.extend(map(_pin_message, step.pins))
    for parent, child, length in step.forks:
        message.forks.add(parent=parent, child=child, length=length)
    for sequence, reason, group in step.frees:
        message.frees.add(sequence=sequence, reason=FREE_REASONS[reason], preempted_for_group=group)
    message.swap_outs.extend(step.swap_outs)
    message.swap_ins.extend(step.swap_ins)
    if step.extends:
        _write_extends(step.extends, message.extends)
    for allocate in step.allocates:
        fields = allocate._asdict()
        waited = duration(fields.pop("waited_seconds"))
        message.allocates.add(**fields, waited=waited)


def step_of(message: pb.Step) -> Step:
    """Read a block step. Raises InvalidField for malformed fields."""
    return Step(
        step=message.step,
        condemns=_condemns(message.condemns) if message.HasField("condemns") else (),
        commits=_commits(message.commits) if message.HasField("commits") else (),
        trims=trims_of(message.trims) if message.HasField("trims") else (),
        pins=[_pin_change(item) for item in message.pins],
        forks=[Fork(item.parent, item.child, item.length) for item in message.forks],
        frees=[Free(item.sequence, _free_reason(item.reason), item.preempted_for_group) for item in message.frees],
        swap_outs=list(message.swap_outs),
        swap_ins=list(message.swap_ins),
        extends=_extends(message.extends) if message.HasField("extends") else (),
        allocates=[allocate_of(item) for item in message.allocates],
        lengths=pairs(message.length_sequences, message.length_tokens, "step.lengths"),
    )


# Columns are read as slices, because iterating a repeated field takes several times as long.


def _write_condemns(condemns: Sequence[Condemn], message: pb.Condemns) -> None:
    sequences, block_ids, reasons, hosts, kinds = zip(*condemns, strict=True)
    message.sequences.extend(sequences)
    message.reasons.extend(map(CONDEMN_REASONS.__getitem__, reasons))
    message.tiers.extend([pb.TIER_HOST if host else pb.TIER_DEVICE for host in hosts])
    message.kinds.extend(kinds)
    message.block_counts.extend(map(len, block_ids))
    message.block_ids.extend(chain.from_iterable(block_ids))


def _condemns(message: pb.Condemns) -> list[Condemn]:
    blocks = split_by_counts(array("i", message.block_ids[:]), message.block_counts[:], "step.condemns")
    columns = (message.sequences[:], message.reasons[:], message.tiers[:], message.kinds[:])
    return _rows(condemn_of, "step.condemns", *columns, blocks)


def condemn_of(sequence: int, reason: int, tier: int, kind: int, blocks: Sequence[int]) -> Condemn:
    """Read a condemn. Raises InvalidField for an unknown reason or tier."""
    if reason not in _CONDEMN_REASONS_OF:
        field = "step.condemns.reasons"
        raise InvalidField(f"{field} has {reason}, which is not a CondemnReason", field)
    if tier not in _IN_HOST:
        raise InvalidField(f"step.condemns.tiers has {tier}, which is not a Tier", "step.condemns.tiers")
    return Condemn(sequence, blocks, _CONDEMN_REASONS_OF[reason], _IN_HOST[tier], kind)


def _write_commits(commits: Sequence[Commit], message: pb.Commits) -> None:
    sequences, first_indices, token_ids = zip(*commits, strict=True)
    message.sequences.extend(sequences)
    message.first_indices.extend(first_indices)
    message.token_counts.extend(map(len, token_ids))
    message.token_ids.extend(chain.from_iterable(token_ids))


def _commits(message: pb.Commits) -> list[Commit]:
    token_ids = split_by_counts(array("i", message.token_ids[:]), message.token_counts[:], "step.commits")
    return _rows(Commit, "step.commits", message.sequences[:], message.first_indices[:], token_ids)


def trims_of(message: pb.Trims) -> list[Trim]:
    """Read trims. Raises InvalidField if the columns differ in length."""
    return _rows(Trim, "step.trims", message.sequences[:], message.positions[:])


def _write_extends(extends: Sequence[Extend], message: pb.Extends) -> None:
    groups, rooms = zip(*extends, strict=True)
    counts = list(map(len, rooms))
    together = list(chain.from_iterable(rooms))
    message.groups.extend(groups)
    message.sequences.extend([sequence for sequence, _ in together])
    message.room_tokens.extend([tokens for _, tokens in together])
    if set(counts) != {1}:
        message.sequence_counts.extend(counts)


def _extends(message: pb.Extends) -> list[Extend]:
    rooms = pairs(message.sequences, message.room_tokens, "step.extends")
    counts = message.sequence_counts[:]
    if counts:
        return _rows(Extend, "step.extends", message.groups[:], split_by_counts(rooms, counts, "step.extends"))
    return _rows(Extend, "step.extends", message.groups[:], [(room,) for room in rooms])


def _rows(make: Callable[..., _Row], field: str, *columns: Sequence[object]) -> list[_Row]:
    check_columns(field, *columns)
    return list(map(make, *columns))


def _pin_message(change: PinChange) -> pb.PinChange:
    match change:
        case Pin():
            return pb.PinChange(pin=pb.Pin(**change._asdict()))
        case Unpin():
            return pb.PinChange(unpin=change.pin_id)
        case Reset():
            return pb.PinChange(reset=True)


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
    return check_length(value, limits.MAX_PIN_ID_LENGTH, "step.pins.pin_id")


def _free_reason(value: int) -> FreeReason:
    if value not in _REASONS_OF:
        raise InvalidField(f"step.frees.reason is {value}, which is not a FreeReason", "step.frees.reason")
    return _REASONS_OF[value]


def allocate_of(item: pb.Allocate) -> Allocate:
    """Read an allocate. Raises InvalidField for texts that are too long, and for an invalid duration."""
    check_length(item.trace_parent, limits.MAX_ID_LENGTH, "step.allocates.trace_parent")
    return Allocate(
        group=item.group,
        sequence=item.sequence,
        request_id=check_length(item.request_id, limits.MAX_ID_LENGTH, "step.allocates.request_id"),
        salt=check_length(item.salt, limits.MAX_SALT_LENGTH, "step.allocates.salt"),
        token_ids=array("i", item.token_ids),
        compute_tokens=item.compute_tokens,
        spare_blocks=item.spare_blocks,
        waited_seconds=checked_seconds_of(item.waited, "step.allocates.waited"),
        prefix_of=check_length(item.prefix_of, limits.MAX_ID_LENGTH, "step.allocates.prefix_of"),
        window_spares=tuple(item.window_spares),
    )
