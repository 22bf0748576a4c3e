"""Operators' changes to the prefix caches of a model, applied to each of its engines."""

import asyncio
from collections.abc import Sequence

from quire.v1 import engine_pb2, gateway_pb2, pins_pb2
from services.gateway.access.namespace import Namespace
from services.gateway.fleet.engine_link import EngineLink
from services.gateway.fleet.fleet import Fleet
from services.gateway.request_handler import RequestHandler
from services.runtime.errors import InvalidField, Unavailable, UnknownPin

Pins = Sequence[pins_pb2.PinnedPrefix]

# If the caller has set no deadline. Computing a long prefix behind a full queue takes this long.
ADMIN_TIMEOUT_SECONDS = 60.0

_ACTIONS = ", ".join(field.name for field in gateway_pb2.AdminRequest.DESCRIPTOR.oneofs_by_name["action"].fields)


class FleetAdministration:
    """Executes admin requests. Prompts to pin are tokenized by the request handler."""

    def __init__(self, fleet: Fleet, handler: RequestHandler, namespace: Namespace) -> None:
        self._fleet = fleet
        self._handler = handler
        self._namespace = namespace

    async def administer(self, request: gateway_pb2.AdminRequest, timeout: float) -> gateway_pb2.AdminResponse:
        """Execute a request at all connected engines of its model; `timeout` is in seconds. Raises a ServiceError."""
        model = self._fleet.model(request.model)
        engine_request = await self._engine_request(request)
        links = [link for link in model.links if link.readiness.ready]
        if not links:
            raise Unavailable(f"no engine of model {model.name!r} is connected")
        responses = await asyncio.gather(
            *(link.administer(engine_request, timeout) for link in links), return_exceptions=True
        )
        return gateway_pb2.AdminResponse(pins=_merged(_successes(responses)))

    async def pin(self, link: EngineLink, prompt: gateway_pb2.PinPrompt, timeout: float) -> pins_pb2.PinnedPrefix:
        """Pin a prompt at one engine, and return the pin; `timeout` is in seconds. Raises a ServiceError."""
        model = link.description().model
        engine_request = await self._engine_request(gateway_pb2.AdminRequest(model=model, pin_prefix=prompt))
        response = await link.administer(engine_request, timeout)
        return next(pin for pin in response.pins if pin.name == prompt.name)

    async def _engine_request(self, request: gateway_pb2.AdminRequest) -> engine_pb2.EngineAdminRequest:
        result = engine_pb2.EngineAdminRequest()
        match request.WhichOneof("action"):
            case "pin_prefix":
                pin = request.pin_prefix
                salt = self._namespace.salt_of_pin(pin)
                token_ids = await self._prefix_ids(request.model, pin.prompt)
                tokens = engine_pb2.PinTokens(name=pin.name, token_ids=token_ids, salt=salt)
                result.pin_prefix.CopyFrom(tokens)
            case "unpin_prefix":
                result.unpin_prefix.CopyFrom(request.unpin_prefix)
            case "reset_prefix_cache":
                result.reset_prefix_cache.SetInParent()
            case "list_pinned":
                result.list_pinned.SetInParent()
            case _:
                raise InvalidField(f"action must be given: one of {_ACTIONS}", "action")
        return result

    async def _prefix_ids(self, model: str, prompt: gateway_pb2.Prompt) -> list[int]:
        try:
            return await self._handler.token_ids(model, prompt, open_turn=False)
        except InvalidField as error:
            raise InvalidField(f"pin_prefix.{error}", f"pin_prefix.{error.field}") from error


def _successes(responses: Sequence[engine_pb2.EngineAdminResponse | BaseException]) -> list[Pins]:
    """Return the pins of the engines that succeeded. Raises the first error; UnknownPin only if all raised it."""
    errors = [one for one in responses if isinstance(one, BaseException)]
    serious = [error for error in errors if not isinstance(error, UnknownPin)]
    if serious or len(errors) == len(responses):
        raise (serious or errors)[0]
    return [one.pins for one in responses if isinstance(one, engine_pb2.EngineAdminResponse)]


def _merged(pins_by_engine: Sequence[Pins]) -> list[pins_pb2.PinnedPrefix]:
    """Return each pin once, as reported by the first engine that has it; `pinned` if all engines have it pinned."""
    first: dict[str, pins_pb2.PinnedPrefix] = {}
    times_pinned: dict[str, int] = {}
    for pins in pins_by_engine:
        for pin in pins:
            first.setdefault(pin.name, pin)
            times_pinned[pin.name] = times_pinned.get(pin.name, 0) + pin.pinned
    for name, pin in first.items():
        pin.pinned = times_pinned[name] == len(pins_by_engine)
    return list(first.values())
