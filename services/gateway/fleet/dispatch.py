"""Gives requests to engines: finds who has the prompt, asks the router, submits."""

import logging
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from blocks import prefix_keys, root_key
from quire.v1 import engine_pb2
from services.gateway.fleet.engine_events import FailoverReason
from services.gateway.fleet.engine_link import EngineLink
from services.gateway.fleet.fleet import Fleet, ServedModel
from services.gateway.fleet.observer import FleetObserver
from services.gateway.fleet.prefix_lookup import PrefixLookup
from services.gateway.fleet.request_stream import RequestStream
from services.gateway.fleet.routing import Candidate, Router, RoutingChoice, RoutingPolicy
from services.runtime.errors import RejectionReason, ServiceError, Unavailable
from services.runtime.tracing.spans import NO_SPAN, Attributes, Span

log = logging.getLogger("quire.gateway")


@dataclass(eq=False)
class Placement:
    """A request at an engine. `clock` is in seconds; `keys` are those of its prompt's blocks."""

    engine_id: str
    link: EngineLink
    ticket: RequestStream
    keys: Sequence[bytes]
    expected_tokens: int  # of the prompt that need not be computed
    clock: Callable[[], float]
    span: Span  # of the attempt

    def __post_init__(self) -> None:
        self.link.work.give(self.clock(), len(self.ticket.submission.prompt_token_ids) - self.expected_tokens)
        self._sent = self.link.work.sent
        self._sent.sent(self.keys)

    def started(self, cached_tokens: int) -> None:
        """Count as work what is really computed."""
        self.link.work.recent.add(self.clock(), self.expected_tokens - cached_tokens)

    def cancel(self, reason: engine_pb2.CancelReason.ValueType, sample: int | None = None) -> None:
        """End it, or one sample of it, at the engine; its last event still comes."""
        self.link.cancel(self.ticket, reason, sample)

    def leave(self, reason: engine_pb2.CancelReason.ValueType | None, fault: str = "") -> None:
        """Have nothing more to do with it. A reason ends the request at the engine; a fault is the engine's."""
        if reason is not None:
            self.cancel(reason)
        self.link.forget(self.ticket)
        self._sent.ended(self.keys)
        self.span.end(fault)


class Dispatcher:
    """EngineAddresses requests of one gateway. `lookup` asks the KV manager; without one, memory has to do."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        lookup: PrefixLookup | None,
        observer: FleetObserver,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._lookup = lookup
        self._observer = observer
        self._clock = clock

    async def place(
        self,
        model: ServedModel,
        submission: engine_pb2.Submission,
        span: Span = NO_SPAN,
        avoid: Collection[EngineLink] = (),
    ) -> Placement:
        """Submit a request to the best engine that is not to be avoided. Raises Unavailable when there is none.

        Its span gets a part for the choice, and one for the attempt that lasts until the placement is left.
        """
        with span.start_child("route"):
            model.check_ready()
            known = await self._known_tokens(model, submission)
            links = {engine_id: link for engine_id, link in model.ready().items() if link not in avoid}
            if not links:
                raise Unavailable(
                    f"no engine of model {model.name!r} takes requests", rejection=RejectionReason.UNAVAILABLE
                )
            keys = self._keys(links.values(), submission)
            candidates = [self._candidate(engine_id, link, keys, known) for engine_id, link in links.items()]
            choice = self._router.choose(candidates, len(submission.prompt_token_ids))
        expected = next(one.cached_tokens for one in candidates if one.engine_id == choice.engine_id)
        link = links[choice.engine_id]
        attempt = span.start_child("attempt", _attempt_attributes(submission, choice, expected), calls=True)
        submission.trace_parent = attempt.trace_parent
        try:
            ticket = link.submit(submission)
        except ServiceError as error:
            attempt.end(type(error).__name__)
            raise
        self._observer.on_routed(model.name, choice.engine_id, choice.reason.value, expected)
        if submission.isolated:
            fields = {"request_id": submission.request_id, "model": model.name, "engine": choice.engine_id}
            log.warning("engines were lost with the request, it goes on isolated", extra=fields)
            self._observer.on_isolated(model.name, choice.engine_id)
        own_keys = keys.get(link.description().block_size, ())
        return Placement(choice.engine_id, link, ticket, own_keys, expected, self._clock, attempt)

    async def wait_for_change(self) -> None:
        """See `Fleet.wait_for_change`."""
        await self._fleet.wait_for_change()

    def failed_over(self, model: str, request_id: str, engine_id: str, reason: FailoverReason) -> None:
        """Log and count that a request leaves this engine before it has ended."""
        fields = {"request_id": request_id, "model": model, "engine": engine_id, "reason": reason.value}
        log.info("request leaves engine %s", engine_id, extra=fields)
        self._observer.on_failover(model, engine_id, reason.value)

    def given_up(self, model: str, request_id: str, engine_ids: Sequence[str]) -> None:
        """Log and count that engines were lost with a request, one after the other, and it is not tried again."""
        fields = {"request_id": request_id, "model": model, "engine": engine_ids[-1], "engines": list(engine_ids)}
        log.error("request is given up: engines were lost with it, the last one while it was isolated", extra=fields)
        self._observer.on_given_up(model)

    async def _known_tokens(self, model: ServedModel, submission: engine_pb2.Submission) -> dict[str, int] | None:
        """Ask the KV manager, where the answer can make a difference."""
        links = model.ready().values()
        if self._lookup is None or self._router.policy is not RoutingPolicy.PREFIX or len(links) < 2:
            return None
        fingerprints = {link.description().model_fingerprint for link in links}
        fingerprint = fingerprints.pop() if len(fingerprints) == 1 else ""
        return await self._lookup.cached_tokens(submission.prompt_token_ids, submission.salt, fingerprint)

    def _keys(self, links: Collection[EngineLink], submission: engine_pb2.Submission) -> dict[int, Sequence[bytes]]:
        """Return the keys of the prompt's blocks by the size of a block, where prefixes count."""
        if self._router.policy is not RoutingPolicy.PREFIX:
            return {}
        sizes = {link.description().block_size for link in links}
        root, tokens = root_key("", submission.salt), array("i", submission.prompt_token_ids)
        return {size: list(prefix_keys(root, tokens, size)) for size in sizes}

    def _candidate(
        self, engine_id: str, link: EngineLink, keys: dict[int, Sequence[bytes]], known: dict[str, int] | None
    ) -> Candidate:
        block_size = link.description().block_size
        own = keys.get(block_size, ())
        if known is None or engine_id not in known:
            blocks = link.work.sent.cached_blocks(own)
        else:
            blocks = link.work.sent.cached_blocks_beyond(own, min(known[engine_id] // block_size, len(own)))
        return Candidate(
            engine_id=engine_id,
            cached_tokens=blocks * block_size,
            recent_tokens=link.work.recent.tokens(self._clock()),
            requests=link.requests,
            waiting_tokens=link.work.waiting_tokens,
        )


def _attempt_attributes(submission: engine_pb2.Submission, choice: RoutingChoice, expected_tokens: int) -> Attributes:
    return {
        "quire.attempt": submission.attempt,
        "quire.engine": choice.engine_id,
        "quire.routing.reason": choice.reason.value,
        "quire.routing.cached_tokens": expected_tokens,
    }
