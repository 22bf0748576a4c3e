"""Sends requests to engines: looks up cached prefixes, chooses an engine, submits."""

import logging
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
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
from services.wire.features import required_features

log = logging.getLogger("quire.gateway")


@dataclass(eq=False)
class Placement:
    """A request at an engine of a model fingerprint. `keys` are those of its prompt's blocks; `clock` is in seconds."""

    engine_id: str
    fingerprint: str
    link: EngineLink
    stream: RequestStream
    keys: Sequence[bytes]
    expected_tokens: int  # of the prompt in the prefix cache
    clock: Callable[[], float]
    span: Span  # of the attempt

    def __post_init__(self) -> None:
        self.link.load.on_sent(self.clock(), len(self.stream.submission.prompt_token_ids) - self.expected_tokens)
        self._prefixes = self.link.load.prefixes
        self._prefixes.add(self.keys)

    def on_started(self, cached_tokens: int) -> None:
        """Correct the engine's load by the actual number of cached tokens."""
        self.link.load.recent.add(self.clock(), self.expected_tokens - cached_tokens)

    def cancel(self, reason: engine_pb2.CancelReason.ValueType, sample: int | None = None) -> None:
        """Cancel the request or one of its samples at the engine; its RequestFinished still follows."""
        self.link.cancel(self.stream, reason, sample)

    def release(self, reason: engine_pb2.CancelReason.ValueType | None, error: str = "") -> None:
        """Release the engine, cancelling the request there if a reason is given. `error` ends the attempt's span."""
        if reason is not None:
            self.cancel(reason)
        self.link.release(self.stream)
        self._prefixes.remove(self.keys)
        self.span.end(error)


class Dispatcher:
    """Places the requests of one gateway. Without `lookup`, cached prefixes are estimated from what was sent."""

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
        fingerprint: str = "",
    ) -> Placement:
        """Submit a request to the best engine not in `avoid`. Raises Unavailable if no engine accepts the request.

        With a `fingerprint`, only engines of this model fingerprint are considered: others have other weights, or
        another type of KV cache.
        `span` gets two children: the choice, and the attempt, which lasts until the placement is released.
        """
        with span.start_child("route"):
            model.check_ready()
            cached = await self._look_up(model, submission)
            ready = {engine_id: link for engine_id, link in model.ready_links().items() if link not in avoid}
            ready = _with_fingerprint(model.name, ready, fingerprint)
            links = _supporting(model.name, ready, required_features(submission))
            keys = self._keys(links.values(), submission)
            candidates = [self._candidate(engine_id, link, keys, cached) for engine_id, link in links.items()]
            choice = self._router.choose(candidates, len(submission.prompt_token_ids))
        expected = next(one.cached_tokens for one in candidates if one.engine_id == choice.engine_id)
        link = links[choice.engine_id]
        attempt = span.start_child("attempt", _attempt_attributes(submission, choice, expected), calls=True)
        submission.trace_parent = attempt.trace_parent
        try:
            stream = link.submit(submission)
        except ServiceError as error:
            attempt.end(type(error).__name__)
            raise
        self._observer.on_routed(model.name, choice.engine_id, choice.reason.value, expected)
        if submission.isolated:
            fields = {"request_id": submission.request_id, "model": model.name, "engine": choice.engine_id}
            log.warning("two engines were lost with the request: the next one runs it isolated", extra=fields)
            self._observer.on_isolated(model.name, choice.engine_id)
        description = link.description()
        own_keys = keys.get(description.block_size, ())
        place = choice.engine_id, description.model_fingerprint
        return Placement(*place, link, stream, own_keys, expected, self._clock, attempt)

    async def wait_for_change(self) -> None:
        """See `Fleet.wait_for_change`."""
        await self._fleet.wait_for_change()

    def on_failover(self, model: str, request_id: str, engine_id: str, reason: FailoverReason) -> None:
        """Report that a request was taken from this engine before its end."""
        fields = {"request_id": request_id, "model": model, "engine": engine_id, "reason": reason.value}
        log.info("request fails over from engine %s", engine_id, extra=fields)
        self._observer.on_failover(model, engine_id, reason.value)

    def on_given_up(self, model: str, request_id: str, engine_ids: Sequence[str]) -> None:
        """Report that engines were lost with a request one after the other, and that it is not retried."""
        fields = {"request_id": request_id, "model": model, "engine": engine_ids[-1], "engines": list(engine_ids)}
        log.error("request given up: it took down several engines, the last one while it ran isolated", extra=fields)
        self._observer.on_given_up(model)

    async def _look_up(self, model: ServedModel, submission: engine_pb2.Submission) -> dict[str, int] | None:
        """Look up cached tokens by engine at the KV managers, if the result can change the choice."""
        ready = model.ready_links()
        links = ready.values()
        if self._lookup is None or self._router.policy is not RoutingPolicy.PREFIX or len(links) < 2:
            return None
        fingerprints = {link.description().model_fingerprint for link in links}
        fingerprint = fingerprints.pop() if len(fingerprints) == 1 else ""
        return await self._lookup.cached_tokens(submission.prompt_token_ids, submission.salt, fingerprint, ready.keys())

    def _keys(self, links: Collection[EngineLink], submission: engine_pb2.Submission) -> dict[int, Sequence[bytes]]:
        """Return the keys of the prompt's blocks by block size, if the policy needs them."""
        if self._router.policy is not RoutingPolicy.PREFIX:
            return {}
        sizes = {link.description().block_size for link in links}
        root, tokens = root_key("", submission.salt), array("i", submission.prompt_token_ids)
        return {size: list(prefix_keys(root, tokens, size)) for size in sizes}

    def _candidate(
        self, engine_id: str, link: EngineLink, keys: dict[int, Sequence[bytes]], cached: dict[str, int] | None
    ) -> Candidate:
        block_size = link.description().block_size
        own = keys.get(block_size, ())
        if cached is None or engine_id not in cached:
            blocks = link.load.prefixes.expected_blocks(own)
        else:
            blocks = link.load.prefixes.confirmed_blocks(own, min(cached[engine_id] // block_size, len(own)))
        return Candidate(
            engine_id=engine_id,
            cached_tokens=blocks * block_size,
            recent_tokens=link.load.recent.tokens(self._clock()),
            requests=link.requests,
            pending_prefill_tokens=link.load.pending_prefill_tokens,
        )


def _with_fingerprint(model_name: str, ready: dict[str, EngineLink], fingerprint: str) -> dict[str, EngineLink]:
    """Return the engines of this fingerprint, all without one. Raises Unavailable if there are only others."""
    links = {name: link for name, link in ready.items() if fingerprint in ("", link.description().model_fingerprint)}
    if ready and not links:
        raise Unavailable(
            f"no engine of model {model_name!r} has the weights and the type of KV cache that the request began with",
            rejection=RejectionReason.UNAVAILABLE,
        )
    return links


def _supporting(model_name: str, ready: Mapping[str, EngineLink], features: frozenset[str]) -> dict[str, EngineLink]:
    """Return the engines that have these features. Raises Unavailable without any."""
    links = {engine_id: link for engine_id, link in ready.items() if features.issubset(link.description().features)}
    if links:
        return links
    cause = f" with {', '.join(sorted(features))}: they are of an older version" if ready else ""
    raise Unavailable(
        f"no engine of model {model_name!r} accepts requests{cause}", rejection=RejectionReason.UNAVAILABLE
    )


def _attempt_attributes(submission: engine_pb2.Submission, choice: RoutingChoice, expected_tokens: int) -> Attributes:
    return {
        "quire.attempt": submission.attempt,
        "quire.engine": choice.engine_id,
        "quire.routing.reason": choice.reason.value,
        "quire.routing.cached_tokens": expected_tokens,
    }
