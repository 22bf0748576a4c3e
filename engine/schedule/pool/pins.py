"""Pinned prefixes: beginnings of prompts that an operator declares, computed once and kept whoever else needs space.

A pin begins as a request of its own, which waits in the queue and shares the budget with all others, and of which
nothing is sampled. When its blocks are computed, the next Step gives them their keys, pins them, and frees the request.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from blocks import Pin, Reset, Unpin
from engine.errors import (
    BlockManagerBroken,
    InvalidPin,
    PinExists,
    PinFailed,
    PinRefused,
    PinTooLarge,
    PinUnavailable,
    UnknownPin,
)
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.pool.step_builder import StepBuilder
from engine.schedule.request import MAX_SALT_BYTES, Capacity, Failure, FinishReason, Request, Sampling, Stopping
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group

# What the requests of pins are called, in the history of blocks too.
_REQUEST_PREFIX = "pin:"
MAX_NAME_BYTES = 128


class PinState(Enum):
    """How far a pin is."""

    COMPUTING = 1
    PENDING = 2
    PINNED = 3


@dataclass(eq=False)
class PinnedPrefix:
    """A declared prefix: whole blocks of tokens, and once it is pinned the device blocks that hold them. Pins write it.

    `failure` says why it never will be: then it is not declared any more.
    """

    name: str
    token_ids: tuple[int, ...]
    salt: bytes
    state: PinState = PinState.COMPUTING
    blocks: tuple[int, ...] = ()
    failure: PinRefused | None = None

    @property
    def pinned(self) -> bool:
        """Whether its blocks are there and stay."""
        return self.state is PinState.PINNED

    @property
    def request_id(self) -> str:
        """Id of the request that computes it."""
        return _REQUEST_PREFIX + self.name


class Pins:
    """What is declared, what is pinned, and what the next Step changes of it.

    `changes` counts what was asked for that takes a Step, `changes_done` what of it the block manager has done.
    """

    def __init__(self, queue: RequestQueue, view: PoolView) -> None:
        """Begin with nothing pinned."""
        self.changes = 0
        self.changes_done = 0
        self._queue = queue
        self._view = view
        self._declared: dict[str, PinnedPrefix] = {}
        self._computed: list[tuple[PinnedPrefix, Group]] = []  # to be pinned by the next Step
        self._unpins: list[PinnedPrefix] = []  # to be unpinned by the next Step
        self._in_flight: dict[int, PinnedPrefix] = {}  # by their positions in the Step under way
        self._reset = False
        self._changes_written = 0

    @property
    def has_changes(self) -> bool:
        """Whether the next Step has to unpin something or to forget the cache."""
        return self._reset or bool(self._unpins)

    # What operators ask for.

    def find(self, name: str, token_ids: tuple[int, ...], salt: bytes) -> PinnedPrefix | None:
        """Return the prefix of this name if it is declared, None if it can be. Raises a PinRefused otherwise."""
        capacity = self._view.capacity
        _check(capacity, name, token_ids)
        if len(salt) > MAX_SALT_BYTES:
            raise InvalidPin(f"salt has {len(salt)} bytes, the most is {MAX_SALT_BYTES}", "salt")
        whole = _whole_blocks(capacity, token_ids)
        known = self._declared.get(name)
        if known is None:
            if (request_id := _REQUEST_PREFIX + name) in self._queue.by_request:
                raise PinExists(f"a request of the id {request_id!r} is live", "name")
            self._check_fits(len(whole) // capacity.block_size)
        elif (known.token_ids, known.salt) != (whole, salt):
            raise PinExists(f"{name!r} is pinned already, with other tokens or another salt", "name")
        return known

    def declare(self, name: str, token_ids: tuple[int, ...], salt: bytes) -> PinnedPrefix:
        """Declare a prefix that `find` did not find."""
        pin = PinnedPrefix(name, _whole_blocks(self._view.capacity, token_ids), salt)
        self._declared[name] = pin
        self._count()
        return pin

    def remove_pin(self, name: str) -> PinnedPrefix:
        """Remove a prefix; whoever computes it still can be ended. Raises InvalidPin and UnknownPin."""
        _check_name(name)
        if name not in self._declared:
            raise UnknownPin(f"nothing is pinned as {name!r}", "name")
        pin = self._declared.pop(name)
        pin.failure = UnknownPin(f"{name!r} was unpinned meanwhile", "name")
        self._schedule_unpin(pin)
        return pin

    def reset(self) -> list[PinnedPrefix]:
        """Let the next Step forget the prefix cache; return what has to be computed anew: all that is declared.

        Nobody would find what is pinned now.
        """
        self._reset = True
        self.changes += 1
        for pin in self._declared.values():
            self._schedule_unpin(pin)
            pin.state, pin.blocks = PinState.COMPUTING, ()
        self._count()
        return list(self._declared.values())

    def list_pins(self) -> list[PinnedPrefix]:
        """Return what is declared, as it is now, in the order of declaration."""
        return [replace(pin) for pin in self._declared.values()]

    # What becomes of it.

    def on_request_end(self, group: Group) -> None:
        """The request of a prefix has ended: it is computed, or it failed, or nobody wants it any more."""
        name = group.request.request_id.removeprefix(_REQUEST_PREFIX)
        if group.finish is FinishReason.STOP:
            self._computed.append((self._declared[name], group))
        elif group.finish is FinishReason.FAILED:
            kind = PinUnavailable if group.failure is Failure.BLOCK_MANAGER else PinFailed
            self._fail(self._declared[name], kind(f"{name!r} was not computed: {group.detail}"))

    def write(self, step: StepBuilder) -> None:
        """Add to a Step what is to change. It comes after the commits, and before the frees."""
        view = self._view
        for pin in self._unpins:
            step.pins.append(Unpin(pin.name))
            view.unpin(pin.blocks)
        if self._reset:
            step.pins.append(Reset())
            view.clear_host_copies()
        for pin, group in self._computed:
            count = len(pin.token_ids) // self._view.capacity.block_size
            pin.state, pin.blocks = PinState.PENDING, tuple(group.trunk.table[:count])
            self._in_flight[len(step.pins)] = pin
            step.pins.append(Pin(pin.name, group.trunk.id, count))
            view.pin(pin.blocks)
        self._unpins.clear()
        self._computed.clear()
        self._reset = False
        self._changes_written = self.changes
        if step.pins:
            self._count()

    def on_result(self, refused: Mapping[int, str]) -> None:
        """Take an answer in: the pins at these positions were refused, all else was done. Raises BlockManagerBroken."""
        asked, self._in_flight = self._in_flight, {}
        if others := refused.keys() - asked.keys():
            raise BlockManagerBroken(f"an unpin or a reset was refused: {refused[min(others)]}")
        for position, pin in asked.items():
            self._finish(pin, refused.get(position))
        self.changes_done = self._changes_written

    def rollback(self, held: Collection[str]) -> None:
        """The Step under way is never answered; by the engine's own books these pins hold blocks after it."""
        asked, self._in_flight = self._in_flight, {}
        for pin in asked.values():
            self._finish(pin, None if pin.name in held else "the block manager went away, and it did not fit")
        self.changes_done = self._changes_written

    def _schedule_unpin(self, pin: PinnedPrefix) -> None:
        """Let the next Step unpin what a prefix holds, or will once the Step under way is answered."""
        self._computed = [entry for entry in self._computed if entry[0] is not pin]
        if pin.state is not PinState.COMPUTING:
            former = replace(pin)
            self._in_flight = {position: former if one is pin else one for position, one in self._in_flight.items()}
            self._unpins.append(former)
            self.changes += 1
        self._count()

    def _finish(self, pin: PinnedPrefix, refusal: str | None) -> None:
        if refusal is None:
            pin.state = PinState.PINNED
            return
        self._view.rollback_pin(pin.blocks)
        self._unpins = [one for one in self._unpins if one is not pin]
        self._fail(pin, PinTooLarge(f"{pin.name!r} cannot be pinned: {refusal}"))

    def _fail(self, pin: PinnedPrefix, why: PinRefused) -> None:
        pin.failure = why
        if self._declared.get(pin.name) is pin:
            del self._declared[pin.name]
        self._count()

    # Room.

    def _check_fits(self, blocks: int) -> None:
        capacity = self._view.capacity
        live = [one.request for one in self._queue.by_request.values() if not one.request.prefill_only]
        most, left = max(map(capacity.max_blocks, live), default=0), capacity.unpinned_blocks
        if blocks >= left:
            raise PinTooLarge(f"prompt takes {blocks} blocks; the pool has {left}, and not all can be pinned", "prompt")
        if blocks + most > left:
            raise PinTooLarge(
                f"prompt takes {blocks} blocks and a live request can need {most}; the pool has {left}", "prompt"
            )

    def _count(self) -> None:
        """Count the blocks that no request can have: those that pins hold, and those of prefixes being computed.

        What is to be unpinned does not count: it is free before anybody else can be given blocks.
        """
        size = self._view.block_size
        held = {block for pin in self._declared.values() for block in pin.blocks}
        computing = sum(len(pin.token_ids) for pin in self._declared.values() if not pin.blocks) // size
        self._view.count_pinned(len(held) + computing)


def request_of(pin: PinnedPrefix, arrival: float) -> Request:
    """Return the request that computes a prefix."""
    return Request(
        request_id=pin.request_id,
        prompt=pin.token_ids,
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=1),
        salt=pin.salt,
        arrival=arrival,
        prefill_only=True,
    )


def _whole_blocks(capacity: Capacity, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    return token_ids[: len(token_ids) // capacity.block_size * capacity.block_size]


def _check_name(name: str) -> None:
    if not 1 <= len(name.encode()) <= MAX_NAME_BYTES:
        raise InvalidPin(f"name has {len(name.encode())} bytes, it must have 1 to {MAX_NAME_BYTES}", "name")


def _check(capacity: Capacity, name: str, token_ids: tuple[int, ...]) -> None:
    length, size = len(token_ids), capacity.block_size
    _check_name(name)
    if length < size:
        raise InvalidPin(f"prompt has {length} tokens, and a block holds {size}: whole blocks are pinned", "prompt")
    if length >= capacity.context_tokens:
        raise InvalidPin(f"prompt has {length} tokens; the model's context has {capacity.context_tokens}", "prompt")
    outside = next((token for token in token_ids if not 0 <= token < capacity.vocabulary_size), None)
    if outside is not None:
        raise InvalidPin(f"prompt has token {outside}, the vocabulary has {capacity.vocabulary_size}", "prompt")
