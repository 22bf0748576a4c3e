"""The events of one request from its engine, and the errors and failovers that they lead to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from quire.v1 import decoding_pb2, engine_pb2
from services.gateway.fleet.request_stream import Event
from services.runtime.errors import (
    DeadlineExceeded,
    GenerationFailed,
    ServiceError,
    Unavailable,
)
from services.wire.requests.errors import FAILURES, REFUSALS

_RUNNING = "timeout exceeded while the request was running"
_AT_DEADLINE = {
    engine_pb2.FAILURE_REASON_DEADLINE: _RUNNING,
    engine_pb2.FAILURE_REASON_DEADLINE_QUEUED: "timeout exceeded while the request was queued",
}
_INVALID_FIELDS = {engine_pb2.FAILURE_REASON_CONSTRAINT: "constraint"}
# A request that is invalid for one engine may fit into the larger pool of another.
_REFUSED_BY_THIS_ENGINE_ONLY = (
    engine_pb2.REFUSAL_REASON_QUEUE_FULL,
    engine_pb2.REFUSAL_REASON_UNAVAILABLE,
    engine_pb2.REFUSAL_REASON_INVALID,
)


class FailoverReason(Enum):
    """Why a request continues at another engine. The values are labels of metrics."""

    LOST = "lost"  # the link broke or timed out
    DRAINED = "drained"  # the engine shut down before the request ended
    NO_KV_MANAGER = "no-kvmanager"  # the engine was disconnected from its KV manager for too long
    REFUSED = "refused"  # full queue, draining, too large for its pool, or the id is live there from a broken link


@dataclass(frozen=True)
class Failover:
    """A request that its engine cannot finish. The client gets `error` if no other engine can either."""

    reason: FailoverReason
    error: ServiceError


@dataclass(slots=True)
class EventBatch:
    """Events read together. The fields are in the order in which their responses are sent to the client."""

    started: engine_pb2.RequestStarted | None = None
    prompts: list[engine_pb2.PromptScores] = field(default_factory=list)
    tokens: dict[int, engine_pb2.SampleTokens] = field(default_factory=dict)  # by sample
    finished: engine_pb2.RequestFinished | None = None
    refused: engine_pb2.RequestRefused | None = None

    @classmethod
    def of(cls, events: Sequence[Event]) -> "EventBatch":
        """Group events by kind. The stream has merged the tokens of each sample."""
        batch = cls()
        for event in events:
            match event:
                case engine_pb2.SampleTokens():
                    batch.tokens[event.sample] = event
                case engine_pb2.RequestStarted():
                    batch.started = event
                case engine_pb2.PromptScores():
                    batch.prompts.append(event)
                case engine_pb2.RequestFinished():
                    batch.finished = event
                case engine_pb2.RequestRefused():
                    batch.refused = event
        return batch


def failover_after_refusal(refused: engine_pb2.RequestRefused) -> Failover:
    """Return the failover for a refusal that other engines may not share. Raises the ServiceError of any other."""
    error = REFUSALS.get(refused.reason, GenerationFailed)(refused.detail, refused.field)
    # A live id belongs to another request on the first attempt; later, it may be this one's from a broken link.
    still_live = refused.reason == engine_pb2.REFUSAL_REASON_ALREADY_EXISTS and refused.attempt > 1
    if still_live or refused.reason in _REFUSED_BY_THIS_ENGINE_ONLY:
        return Failover(FailoverReason.REFUSED, error)
    raise error


def failover_after_finish(finished: engine_pb2.RequestFinished, open_samples: Sequence[bool]) -> Failover | None:
    """Return the failover if the engine ended open samples that another engine can continue."""
    reasons = {end.reason for end, is_open in zip(finished.samples, open_samples, strict=True) if is_open}
    if decoding_pb2.FINISH_REASON_CANCELLED in reasons:
        return Failover(FailoverReason.DRAINED, Unavailable("the engine is shutting down"))
    if finished.failure == engine_pb2.FAILURE_REASON_BLOCK_MANAGER:
        return Failover(FailoverReason.NO_KV_MANAGER, Unavailable(finished.detail))
    return None


def failure_error(finished: engine_pb2.RequestFinished) -> ServiceError:
    """Return the error for a request that failed at its engine."""
    if finished.failure in _AT_DEADLINE:
        return DeadlineExceeded(_AT_DEADLINE[finished.failure], "timeout")
    kind = FAILURES.get(finished.failure, GenerationFailed)
    return kind(finished.detail, _INVALID_FIELDS.get(finished.failure, ""))


def deadline_error(*, started: bool) -> DeadlineExceeded:
    """Return the error for a deadline that passed at the gateway; `started`: an engine has reported its start.

    The report comes with the first results, so without it the request may be in the queue or in its prefill.
    """
    return DeadlineExceeded(_RUNNING if started else "timeout exceeded before the first token", "timeout")
