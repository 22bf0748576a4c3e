"""Pinned prefixes: prompt prefixes that an operator declares; they are computed once and never evicted.

A pin starts as a request that waits in the queue, shares the token budget, and samples nothing. When its blocks are
computed, the next block step commits their keys, pins them, and frees the request.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum

from blocks import Pin, Reset, Unpin, counted
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
from engine.schedule.capacity import Capacity
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.pool.step_builder import StepBuilder
from engine.schedule.pool.window_view import WindowView
from engine.schedule.request import Failure, FinishReason, Request, Sampling, Stopping
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group

# Prefix of the request ids of pins, also in the history of blocks.
_REQUEST_PREFIX = "pin:"
MAX_NAME_BYTES = 128
MAX_SALT_BYTES = 480


class PinState(Enum):
    """Progress of a pin."""

    COMPUTING = 1
    PENDING = 2
    PINNED = 3


@dataclass(eq=False)
class PinnedPrefix:
    """A declared prefix: whole blocks of tokens, and its device blocks of each kind once it is pinned. Written by Pins.

    `failure` says why it will never be pinned; then it is no longer declared.
    """

    name: str
    token_ids: tuple[int, ...]
    salt: bytes
    state: PinState = PinState.COMPUTING
    blocks: tuple[int, ...] = ()
    in_windows: tuple[tuple[int, ...], ...] = ()
    failure: PinRefused | None = None

    @property
    def pinned(self) -> bool:
        """Whether its blocks are pinned."""
        return self.state is PinState.PINNED

    @property
    def request_id(self) -> str:
        """Id of the request that computes it."""
        return _REQUEST_PREFIX + self.name


class Pins:
    """Declared and pinned prefixes, and the changes for the next block step.

    `changes` counts requested changes that need a block step; `changes_done` counts those that the block manager has
    done.
    """

    def __init__(self, queue: RequestQueue, view: PoolView) -> None:
        self.changes = 0
        self.changes_done = 0
        self._queue = queue
        self._view = view
        self._declared: dict[str, PinnedPrefix] = {}
        self._computed: list[tuple[PinnedPrefix, Group]] = []  # the next block step pins them
        self._unpins: list[PinnedPrefix] = []  # the next block step unpins them
        self._in_flight: dict[int, PinnedPrefix] = {}  # by position in the block step in flight
        self._reset = False
        self._changes_written = 0

    @property
    def has_changes(self) -> bool:
        """Whether the next block step must unpin a prefix or clear the cache."""
        return self._reset or bool(self._unpins)

    # Declarations.

    def find(self, name: str, token_ids: tuple[int, ...], salt: bytes) -> PinnedPrefix | None:
        """Return the prefix if it is declared, None if it can be. Raises PinRefused otherwise."""
        capacity = self._view.capacity
        _check(capacity, name, token_ids)
        if len(salt) > MAX_SALT_BYTES:
            raise InvalidPin(f"salt must have at most {MAX_SALT_BYTES} bytes, not {len(salt)}", "salt")
        whole = _whole_blocks(capacity, token_ids)
        known = self._declared.get(name)
        if known is None:
            if (request_id := _REQUEST_PREFIX + name) in self._queue.by_request:
                raise PinExists(f"name {name!r} is in use: a request with id {request_id!r} is live", "name")
            self._check_fits(len(whole) // capacity.block_size)
            self._check_windows(PinnedPrefix(name, whole, salt))
        elif (known.token_ids, known.salt) != (whole, salt):
            raise PinExists(f"name {name!r} is in use for a prefix with other tokens or another salt", "name")
        return known

    def declare(self, name: str, token_ids: tuple[int, ...], salt: bytes) -> PinnedPrefix:
        """Declare a prefix for which `find` returned None."""
        pin = PinnedPrefix(name, _whole_blocks(self._view.capacity, token_ids), salt)
        self._declared[name] = pin
        self._count()
        return pin

    def remove_pin(self, name: str) -> PinnedPrefix:
        """Remove a prefix; the caller ends the request that may still compute it. Raises InvalidPin and UnknownPin."""
        _check_name(name)
        if name not in self._declared:
            raise UnknownPin(f"name {name!r} is not pinned", "name")
        pin = self._declared.pop(name)
        pin.failure = UnknownPin(f"{name!r} was unpinned while it was computed", "name")
        self._schedule_unpin(pin)
        return pin

    def reset(self) -> list[PinnedPrefix]:
        """Clear the prefix cache with the next block step; return all declared prefixes, which must be recomputed.

        Blocks pinned before can no longer be found.
        """
        self._reset = True
        self.changes += 1
        for pin in self._declared.values():
            self._begin_again(pin)
        self._count()
        return list(self._declared.values())

    def recompute(self, wrong: Sequence[Set[int]]) -> list[PinnedPrefix]:
        """Return the prefixes that hold one of these blocks of each kind, which must be recomputed."""
        found = [
            pin
            for pin in self._declared.values()
            if any(not own.isdisjoint(held) for own, held in zip(wrong, (pin.blocks, *pin.in_windows), strict=False))
        ]
        for pin in found:
            self._begin_again(pin)
        self._count()
        return found

    def _begin_again(self, pin: PinnedPrefix) -> None:
        self._schedule_unpin(pin)
        pin.state, pin.blocks, pin.in_windows = PinState.COMPUTING, (), ()

    def list_pins(self) -> list[PinnedPrefix]:
        """Return copies of the declared prefixes in the order of declaration."""
        return [replace(pin) for pin in self._declared.values()]

    # Progress.

    def on_request_end(self, group: Group) -> None:
        """The request of a prefix ended: it was computed, it failed, or it was cancelled."""
        if group.request.scratch:
            return
        name = group.request.request_id.removeprefix(_REQUEST_PREFIX)
        if group.finish is FinishReason.STOP:
            self._computed.append((self._declared[name], group))
        elif group.finish is FinishReason.FAILED:
            kind = PinUnavailable if group.failure is Failure.BLOCK_MANAGER else PinFailed
            self._fail(self._declared[name], kind(f"{name!r} was not computed: {group.detail}"))

    def write(self, step: StepBuilder) -> None:
        """Add the pin changes to a block step, after the commits and before the frees."""
        view = self._view
        for pin in self._unpins:
            step.pins.append(Unpin(pin.name))
            view.unpin(pin.blocks)
            for window, blocks in zip(view.windows, pin.in_windows, strict=True):
                window.unpin(blocks)
        if self._reset:
            step.pins.append(Reset())
            view.reset_cache()
        for pin, group in self._computed:
            count = len(pin.token_ids) // self._view.capacity.block_size
            pin.state, pin.blocks = PinState.PENDING, group.trunk.table[:count]
            pin.in_windows = tuple([window.pinned(group.trunk, count) for window in view.windows])
            self._in_flight[len(step.pins)] = pin
            step.pins.append(Pin(pin.name, group.trunk.id, count))
            view.pin(pin.blocks)
            for window, blocks in zip(view.windows, pin.in_windows, strict=True):
                window.pin(blocks)
        self._unpins.clear()
        self._computed.clear()
        self._reset = False
        self._changes_written = self.changes
        if step.pins:
            self._count()

    def on_result(self, refused: Mapping[int, str]) -> None:
        """Handle a result: the pins at the `refused` positions failed, others succeeded.

        Raises BlockManagerBroken if another change was refused.
        """
        asked, self._in_flight = self._in_flight, {}
        if others := refused.keys() - asked.keys():
            raise BlockManagerBroken(f"unpin or reset was refused: {refused[min(others)]}")
        for position, pin in asked.items():
            self._finish(pin, refused.get(position))
        self.changes_done = self._changes_written

    def rollback(self, held: Collection[str]) -> None:
        """Roll back the block step in flight; `held` names the pins that hold blocks after it."""
        asked, self._in_flight = self._in_flight, {}
        for pin in asked.values():
            self._finish(
                pin, None if pin.name in held else "the block manager disconnected, and the prefix did not fit"
            )
        self.changes_done = self._changes_written

    def _schedule_unpin(self, pin: PinnedPrefix) -> None:
        """Unpin with the next block step what a prefix holds, or will hold after the one in flight."""
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
        for window, blocks in zip(self._view.windows, pin.in_windows, strict=True):
            window.rollback_pin(blocks)
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
            raise PinTooLarge(f"prompt must need fewer than {left} blocks, which are unpinned, not {blocks}", "prompt")
        if blocks + most > left:
            needed = f"prompt needs {counted(blocks, 'block')} and a live request up to {most}"
            raise PinTooLarge(f"{needed}; {left} are unpinned", "prompt")

    def _check_windows(self, pin: PinnedPrefix) -> None:
        """Check that a pin leaves room to compute it, any other pin again after a reset, and each live request."""
        capacity = self._view.capacity
        live = [one.request for one in self._queue.by_request.values() if not one.request.prefill_only]
        for window, left in zip(self._view.windows, capacity.unpinned_in_windows, strict=True):
            own = window.pinned_count(self._blocks_of(pin))
            beside = [self._beside(one, window) for one in (pin, *self._declared.values())]
            most = max([*beside, *(capacity.max_window_blocks(request, window.kind) for request in live)])
            if own + most > left:
                needed = f"prompt needs {counted(own, 'block')} of kind {window.kind.name}, and a request up to {most}"
                raise PinTooLarge(f"{needed}; {left} are unpinned", "prompt")

    def shortage(self, request: Request) -> str:
        """Return what a prefix needs of the first kind that is too small to compute it, empty if it fits."""
        capacity, pin = self._view.capacity, self._declared[request.request_id.removeprefix(_REQUEST_PREFIX)]
        # Its own blocks count as pinned.
        if (left := capacity.unpinned_blocks) < 0:
            own = self._blocks_of(pin)
            return f"{counted(own, 'block')}, but {max(0, own + left)}"
        for window, left in zip(self._view.windows, capacity.unpinned_in_windows, strict=True):
            if (needed := self._beside(pin, window)) > left:
                return f"{counted(needed, 'block')} of kind {window.kind.name} beside pinned ones, but {max(0, left)}"
        return ""

    def _beside(self, pin: PinnedPrefix, window: WindowView) -> int:
        """Return the most blocks of a window kind that computing a prefix needs beyond those it pins."""
        most = self._view.capacity.max_window_blocks(request_of(pin, 0.0), window.kind)
        return max(0, most - window.pinned_count(self._blocks_of(pin)))

    def _blocks_of(self, pin: PinnedPrefix) -> int:
        return len(pin.token_ids) // self._view.block_size

    def _count(self) -> None:
        """Count the blocks unavailable to requests: pinned ones, and those of prefixes being computed.

        Blocks to be unpinned do not count: they are free before any other grant.
        """
        declared = self._declared.values()
        computing = [self._blocks_of(pin) for pin in declared if not pin.blocks]
        held = {block for pin in declared for block in pin.blocks}
        in_windows = [
            len({block for pin in declared if pin.blocks for block in pin.in_windows[number]})
            + sum(map(window.pinned_count, computing))
            for number, window in enumerate(self._view.windows)
        ]
        self._view.count_pinned(len(held) + sum(computing), in_windows)


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
        raise InvalidPin(f"name must have between 1 and {MAX_NAME_BYTES} bytes, not {len(name.encode())}", "name")


def _check(capacity: Capacity, name: str, token_ids: tuple[int, ...]) -> None:
    length, size = len(token_ids), capacity.block_size
    _check_name(name)
    if length < size:
        raise InvalidPin(f"prompt must have at least {size} tokens (one block), not {length}", "prompt")
    if length >= capacity.context_tokens:
        raise InvalidPin(
            f"prompt must have fewer than {capacity.context_tokens} tokens (the model's context), not {length}",
            "prompt",
        )
    outside = next((token for token in token_ids if not 0 <= token < capacity.vocabulary_size), None)
    if outside is not None:
        raise InvalidPin(
            f"prompt must have token ids between 0 and {capacity.vocabulary_size - 1}, not {outside}", "prompt"
        )
