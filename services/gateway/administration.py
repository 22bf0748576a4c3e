"""What operators do to the prefix caches of a model's engines: the same at each of them."""

import asyncio
from collections.abc import Sequence

from quire.v1 import engine_pb2, gateway_pb2, pins_pb2
from services.gateway.access.namespace import Namespace
from services.gateway.fleet.engine_link import EngineLink
from services.gateway.fleet.fleet import Fleet
from services.gateway.request_handler import RequestHandler
from services.runtime.errors import InvalidField, Unavailable, UnknownPin

Pins = Sequence[pins_pb2.PinnedPrefix]

_ACTIONS = ", ".join(field.name for field in gateway_pb2.AdminRequest.DESCRIPTOR.oneofs_by_name["action"].fields)


class FleetAdministration:
    """Takes operators' requests. A prompt to pin is tokenized as the request handler does it."""

    def __init__(self, fleet: Fleet, handler: RequestHandler, namespace: Namespace) -> None:
        self._fleet = fleet
        self._handler = handler
        self._namespace = namespace

    async def administer(self, request: gateway_pb2.AdminRequest, timeout: float) -> gateway_pb2.AdminResponse:
        """Do it at all engines of the model that are there, within so many seconds. Raises a ServiceError."""
        model = self._fleet.model(request.model)
        asked = await self._asked(request)
        links = [link for link in model.links if link.readiness.ready]
        if not links:
            raise Unavailable(f"no engine of model {model.name!r} is there")
        answers = await asyncio.gather(*(link.administer(asked, timeout) for link in links), return_exceptions=True)
        return gateway_pb2.AdminResponse(pins=_merged(_successes(answers)))

    async def pin(self, link: EngineLink, prompt: gateway_pb2.PinPrompt, timeout: float) -> pins_pb2.PinnedPrefix:
        """Pin a prompt at one engine, and return what is pinned. Raises a ServiceError."""
        model = link.description().model
        asked = await self._asked(gateway_pb2.AdminRequest(model=model, pin_prefix=prompt))
        response = await link.administer(asked, timeout)
        return next(pin for pin in response.pins if pin.name == prompt.name)

    async def _asked(self, request: gateway_pb2.AdminRequest) -> engine_pb2.EngineAdminRequest:
        asked = engine_pb2.EngineAdminRequest()
        match request.WhichOneof("action"):
            case "pin_prefix":
                given = request.pin_prefix
                salt = self._namespace.salt_of_pin(given)
                token_ids = await self._prefix_ids(request.model, given.prompt)
                pin = engine_pb2.PinTokens(name=given.name, token_ids=token_ids, salt=salt)
                asked.pin_prefix.CopyFrom(pin)
            case "unpin_prefix":
                asked.unpin_prefix.CopyFrom(request.unpin_prefix)
            case "reset_prefix_cache":
                asked.reset_prefix_cache.SetInParent()
            case "list_pinned":
                asked.list_pinned.SetInParent()
            case _:
                raise InvalidField(f"action is missing: give one of {_ACTIONS}", "action")
        return asked

    async def _prefix_ids(self, model: str, prompt: gateway_pb2.Prompt) -> list[int]:
        try:
            return await self._handler.token_ids(model, prompt, open_turn=False)
        except InvalidField as error:
            raise InvalidField(f"pin_prefix.{error}", f"pin_prefix.{error.field}") from error


def _successes(answers: Sequence[engine_pb2.EngineAdminResponse | BaseException]) -> list[Pins]:
    """Return what is pinned where it was done. Raises the first error, UnknownPin only when no engine has it."""
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    grave = [error for error in errors if not isinstance(error, UnknownPin)]
    if grave or len(errors) == len(answers):
        raise (grave or errors)[0]
    return [answer.pins for answer in answers if isinstance(answer, engine_pb2.EngineAdminResponse)]


def _merged(pins_by_engine: Sequence[Pins]) -> list[pins_pb2.PinnedPrefix]:
    """Return each pin once, as the first engine that has it says; pinned if every engine has it pinned."""
    first: dict[str, pins_pb2.PinnedPrefix] = {}
    times_pinned: dict[str, int] = {}
    for pins in pins_by_engine:
        for pin in pins:
            first.setdefault(pin.name, pin)
            times_pinned[pin.name] = times_pinned.get(pin.name, 0) + pin.pinned
    for name, pin in first.items():
        pin.pinned = times_pinned[name] == len(pins_by_engine)
    return list(first.values())
