"""Reads block steps from their bytes: small ones at once, large ones in slices, none larger than an engine may send."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, starmap
from typing import Any, NamedTuple, TypeVar

from blocks import Allocate, Commit, Condemn, Extend, Step, Trim
from kvmanager import limits
from quire.v1 import kvmanager_pb2 as pb
from services.runtime.errors import InvalidField, UnexpectedMessage
from services.wire.attach import only_field
from services.wire.columns import check_columns, check_counts, pairs
from services.wire.step import allocate_of, condemn_of, step_of
from services.wire.wire_fields import ENTRY_BYTES, Field, Message, Sliced, batches, check_known, numbers, parts

# Sizes that protobuf parses, and that become values, well within a millisecond.
SMALL_BYTES = 1 << 14
_FEW_ITEMS = 256
_BATCH_BYTES = 1 << 13
_ROWS = 1000
_VARINT_BYTES = 10

_COMMITS, _PINS, _FORKS, _FREES, _SWAP_OUTS, _SWAP_INS, _EXTENDS, _ALLOCATES = 2, 3, 4, 5, 6, 7, 8, 9
_LENGTHS = (10, 11)
_CONDEMNS, _TRIMS = 12, 52
_TOKEN_IDS = 5  # of Allocate
_COLUMN_BYTES = limits.MAX_ITEMS * _VARINT_BYTES
_NO_TRACES: Mapping[int, str] = {}

_Row = TypeVar("_Row")


class ReadStep(NamedTuple):
    """A block step, and the trace parents of its allocates by their positions."""

    step: Step
    trace_parents: Mapping[int, str]


def read_step(data: bytes) -> Sliced[ReadStep]:
    """Read a PoolRequest with a block step, in slices. Raises InvalidField, DecodeError, and UnexpectedMessage."""
    if len(data) > SMALL_BYTES:
        return (yield from _large(only_field(data, "step")))
    request = pb.PoolRequest.FromString(data)
    kind = request.WhichOneof("kind")
    if kind != "step":
        raise UnexpectedMessage(f"expected step, got {kind or 'an empty message'}")
    message = request.step
    check_known(message, "step")
    items = len(message.allocates) + len(message.frees) + len(message.forks) + len(message.pins)
    if items > _FEW_ITEMS:
        return (yield from _large(Message(message.SerializeToString(), 0, message.ByteSize(), "step")))
    return ReadStep(step_of(message), trace_parents(message, 0))


def trace_parents(message: pb.Step, first: int) -> Mapping[int, str]:
    """Return the trace parents of a block step's allocates; `first` is the position of the first allocate."""
    if not message.allocates:
        return _NO_TRACES
    return {first + index: one.trace_parent for index, one in enumerate(message.allocates) if one.trace_parent}


def _large(message: Message) -> Sliced[ReadStep]:
    columns = dict.fromkeys((_SWAP_OUTS, _SWAP_INS, *_LENGTHS), _COLUMN_BYTES)
    most = dict.fromkeys((_PINS, _FORKS, _FREES, _ALLOCATES), limits.MAX_ITEMS)
    most |= dict.fromkeys((_CONDEMNS, _COMMITS, _TRIMS, _EXTENDS), 1)
    found = yield from parts(message, pb.Step.DESCRIPTOR, columns, most, ENTRY_BYTES)
    rest = pb.Step.FromString(bytes(found.rest))
    check_known(rest, "step")
    swap_outs = yield from _column(found.columns[_SWAP_OUTS], "step.swap_outs", wide=True)
    swap_ins = yield from _column(found.columns[_SWAP_INS], "step.swap_ins", wide=True)
    lengths = yield from _pairs(found.columns[_LENGTHS[0]], found.columns[_LENGTHS[1]], "step.lengths")
    condemns: list[Condemn] = []
    for field in found.entries[_CONDEMNS]:
        condemns = yield from _condemns(message.of(field, "condemns"))
    commits: list[Commit] = []
    for field in found.entries[_COMMITS]:
        commits = yield from _commits(message.of(field, "commits"))
    trims: list[Trim] = []
    for field in found.entries[_TRIMS]:
        trims = yield from _trims(message.of(field, "trims"))
    extends: list[Extend] = []
    for field in found.entries[_EXTENDS]:
        extends = yield from _extends(message.of(field, "extends"))
    listed = [field for number in (_PINS, _FORKS, _FREES, _ALLOCATES) for field in found.entries[number]]
    items, traces = yield from _items(message, listed)
    step = Step(
        step=rest.step,
        condemns=condemns,
        commits=commits,
        trims=trims,
        swap_outs=swap_outs.tolist(),
        swap_ins=swap_ins.tolist(),
        extends=extends,
        lengths=lengths,
        **items,
    )
    check_items(step)
    return ReadStep(step, traces)


def check_items(step: Step) -> None:
    """Raise InvalidField if a block step has too many items."""
    lists = [items for name, items in vars(step).items() if name not in ("step", "lengths")]
    if sum(map(len, lists)) > limits.MAX_ITEMS:
        raise InvalidField(f"step must have at most {limits.MAX_ITEMS} items, not {sum(map(len, lists))}", "step")
    if len(step.lengths) > limits.MAX_SEQUENCES:
        raise InvalidField(
            f"step.lengths must have at most {limits.MAX_SEQUENCES} entries, not {len(step.lengths)}", "step.lengths"
        )


def _column(column: bytearray, field: str, *, wide: bool = False) -> "Sliced[array[int]]":
    return (yield from numbers(column, limits.MAX_ITEMS, field, wide=wide))


def _pairs(first: bytearray, second: bytearray, field: str) -> Sliced[list[tuple[int, int]]]:
    ids = yield from _column(first, field, wide=True)
    tokens = yield from _column(second, field)
    yield
    return pairs(ids, tokens, field)


def _condemns(message: Message) -> Sliced[list[Condemn]]:
    columns = dict.fromkeys((1, 2, 3, 4, 5), _COLUMN_BYTES) | {6: limits.MAX_CONDEMNED_BLOCKS * _VARINT_BYTES}
    found = yield from parts(message, pb.Condemns.DESCRIPTOR, columns, {}, ENTRY_BYTES)
    check_known(pb.Condemns.FromString(bytes(found.rest)), "step.condemns")
    sequences = yield from _column(found.columns[1], "step.condemns.sequences", wide=True)
    reasons = yield from _column(found.columns[2], "step.condemns.reasons")
    tiers = yield from _column(found.columns[3], "step.condemns.tiers")
    kinds = yield from _column(found.columns[4], "step.condemns.kinds")
    counts = yield from _column(found.columns[5], "step.condemns.block_counts")
    blocks = yield from numbers(found.columns[6], limits.MAX_CONDEMNED_BLOCKS, "step.condemns.block_ids")
    return (yield from _rows(condemn_of, "step.condemns", (sequences, reasons, tiers, kinds), counts, blocks))


def _commits(message: Message) -> Sliced[list[Commit]]:
    columns = dict.fromkeys((1, 2, 3), _COLUMN_BYTES) | {4: limits.MAX_COMMITTED_TOKENS * _VARINT_BYTES}
    found = yield from parts(message, pb.Commits.DESCRIPTOR, columns, {}, ENTRY_BYTES)
    check_known(pb.Commits.FromString(bytes(found.rest)), "step.commits")
    sequences = yield from _column(found.columns[1], "step.commits.sequences", wide=True)
    first_indices = yield from _column(found.columns[2], "step.commits.first_indices")
    counts = yield from _column(found.columns[3], "step.commits.token_counts")
    token_ids = yield from numbers(found.columns[4], limits.MAX_COMMITTED_TOKENS, "step.commits.token_ids")
    return (yield from _rows(Commit, "step.commits", (sequences, first_indices), counts, token_ids))


def _trims(message: Message) -> Sliced[list[Trim]]:
    found = yield from parts(message, pb.Trims.DESCRIPTOR, dict.fromkeys((1, 2), _COLUMN_BYTES), {}, ENTRY_BYTES)
    check_known(pb.Trims.FromString(bytes(found.rest)), "step.trims")
    return list(starmap(Trim, (yield from _pairs(found.columns[1], found.columns[2], "step.trims"))))


def _extends(message: Message) -> Sliced[list[Extend]]:
    columns = dict.fromkeys((1, 2, 3, 4), _COLUMN_BYTES)
    found = yield from parts(message, pb.Extends.DESCRIPTOR, columns, {}, ENTRY_BYTES)
    check_known(pb.Extends.FromString(bytes(found.rest)), "step.extends")
    groups = yield from _column(found.columns[1], "step.extends.groups", wide=True)
    rooms = yield from _pairs(found.columns[3], found.columns[4], "step.extends")
    counts = (yield from _column(found.columns[2], "step.extends.sequence_counts")) or array("i", [1]) * len(rooms)
    return (yield from _rows(Extend, "step.extends", (groups,), counts, rooms))


def _rows(
    make: Callable[..., _Row], field: str, columns: Sequence[Sequence[int]], counts: Sequence[int], lists: Sequence[Any]
) -> Sliced[list[_Row]]:
    """Make rows from columns, each with its part of `lists`."""
    check_columns(field, *columns, counts)
    check_counts(field, counts, len(lists))
    rows: list[_Row] = []
    at = 0
    for position, (count, *fields) in enumerate(zip(counts, *columns, strict=True), 1):
        rows.append(make(*fields, lists[at : at + count]))
        at += count
        if not position % _ROWS:
            yield
    return rows


def _items(message: Message, fields: list[Field]) -> Sliced[tuple[dict[str, list[Any]], dict[int, str]]]:
    """Read pins, forks, frees and allocates: short ones in batches, long allocates one at a time."""
    items: dict[str, list[Any]] = {"pins": [], "forks": [], "frees": [], "allocates": []}
    allocates: list[Allocate] = items["allocates"]
    traces: dict[int, str] = {}
    left = limits.MAX_PROMPT_TOKENS
    for is_long, run in groupby(fields, lambda field: field.end - field.start > ENTRY_BYTES):
        for field in run if is_long else ():
            allocate, trace = yield from _long_allocate(message, field, left)
            left -= len(allocate.token_ids)
            traces |= {len(allocates): trace} if trace else {}
            allocates.append(allocate)
        for batch in batches(message, list(run), _FEW_ITEMS, _BATCH_BYTES):
            yield
            part = pb.Step.FromString(batch)
            check_known(part, "step")
            traces |= trace_parents(part, len(allocates))
            step = step_of(part)
            for name, found in items.items():
                found += getattr(step, name)
    if sum(len(one.token_ids) for one in allocates) > limits.MAX_PROMPT_TOKENS:
        raise InvalidField(
            f"step.allocates must have at most {limits.MAX_PROMPT_TOKENS} tokens", "step.allocates.token_ids"
        )
    return items, traces


def _long_allocate(message: Message, field: Field, max_tokens: int) -> Sliced[tuple[Allocate, str]]:
    inner = message.of(field, pb.Step.DESCRIPTOR.fields_by_number[field.number].name)
    if field.number != _ALLOCATES:
        raise InvalidField(f"{inner.path} must have entries of at most {ENTRY_BYTES} bytes", inner.path)
    columns = {_TOKEN_IDS: limits.MAX_PROMPT_TOKENS * _VARINT_BYTES}
    found = yield from parts(inner, pb.Allocate.DESCRIPTOR, columns, {}, ENTRY_BYTES)
    token_ids = yield from numbers(found.columns[_TOKEN_IDS], max_tokens, "step.allocates.token_ids")
    rest = pb.Allocate.FromString(bytes(found.rest))
    check_known(rest, "step.allocates")
    return allocate_of(rest)._replace(token_ids=token_ids), rest.trace_parent
