"""Administration of an engine's prefix cache: pin, unpin, list and reset."""

import asyncio
from collections.abc import Callable
from typing import Any

from engine import errors as engine_errors
from engine.schedule.pool.pins import PinnedPrefix
from engine.schedule.scheduler import Scheduler
from quire.v1 import engine_pb2 as pb
from quire.v1 import pins_pb2
from services.runtime.errors import (
    GenerationFailed,
    InvalidField,
    PinExists,
    PinTooLarge,
    ServiceError,
    Unavailable,
    UnknownPin,
)

_ERRORS: dict[type[engine_errors.PinRefused], type[ServiceError]] = {
    engine_errors.InvalidPin: InvalidField,
    engine_errors.PinExists: PinExists,
    engine_errors.PinTooLarge: PinTooLarge,
    engine_errors.UnknownPin: UnknownPin,
    engine_errors.PinFailed: GenerationFailed,
    engine_errors.PinUnavailable: Unavailable,
}

_Future = asyncio.Future[pb.EngineAdminResponse]


class Administration:
    """Admin requests in flight. Only the engine's thread calls it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._in_flight: list[tuple[Callable[[], bool], str, _Future]] = []

    def submit(self, request: pb.EngineAdminRequest, answer: _Future, now: float) -> None:
        """Start a request; `answer` resolves when it has completed. A started request cannot be cancelled."""
        action = request.WhichOneof("action") or ""
        try:
            self._in_flight.append((self._start(request, action, now), action, answer))
        except (engine_errors.PinRefused, InvalidField) as error:
            _resolve(answer, error=_service_error(error, action))

    def poll(self) -> None:
        """Resolve the requests that have completed."""
        self._in_flight = [request for request in self._in_flight if not self._try_complete(*request)]

    def _start(self, request: pb.EngineAdminRequest, action: str, now: float) -> Callable[[], bool]:
        """Start a request, and return a function that returns True once it has completed."""
        scheduler = self._scheduler
        match action:
            case "pin_prefix":
                given = request.pin_prefix
                pin = scheduler.requests.pin(given.name, tuple(given.token_ids), given.salt, now)
                return lambda: _is_pinned(pin)
            case "unpin_prefix":
                scheduler.requests.unpin(request.unpin_prefix.name)
            case "reset_prefix_cache":
                scheduler.requests.reset(now)
            case "list_pinned":
                return lambda: True
            case _:
                raise InvalidField("action is missing", "action")
        number = scheduler.pins.changes
        return lambda: scheduler.pins.changes_done >= number

    def _try_complete(self, is_done: Callable[[], bool], action: str, answer: _Future) -> bool:
        try:
            if not is_done():
                return answer.done()  # the caller has been cancelled
        except engine_errors.PinRefused as error:
            _resolve(answer, error=_service_error(error, action))
        else:
            _resolve(answer, response=self._response())
        return True

    def _response(self) -> pb.EngineAdminResponse:
        scheduler = self._scheduler
        pins = map(_pin_message, scheduler.pins.list_pins())
        return pb.EngineAdminResponse(pins=pins, request_blocks=scheduler.capacity.unpinned_blocks)


def _is_pinned(pin: PinnedPrefix) -> bool:
    if pin.failure is not None:
        raise pin.failure
    return pin.pinned


def _service_error(error: engine_errors.PinRefused | InvalidField, action: str) -> ServiceError:
    if isinstance(error, InvalidField):
        return error
    return _ERRORS[type(error)](str(error), f"{action}.{error.field}" if error.field else "")


def _resolve(answer: _Future, **outcome: Any) -> None:
    answer.get_loop().call_soon_threadsafe(lambda: _set(answer, **outcome))


def _set(answer: _Future, response: pb.EngineAdminResponse | None = None, error: ServiceError | None = None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    elif response is not None:
        answer.set_result(response)


def _pin_message(pin: PinnedPrefix) -> pins_pb2.PinnedPrefix:
    return pins_pb2.PinnedPrefix(
        name=pin.name, token_count=len(pin.token_ids), salt=pin.salt, block_ids=pin.blocks, pinned=pin.pinned
    )
