"""The events of one request at an engine, and what they mean for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from quire.v1 import decoding_pb2, engine_pb2
from services.gateway.fleet.request_stream import Event
from services.runtime.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidField,
    Overloaded,
    RequestExists,
    ServiceError,
    Unavailable,
    UnsupportedField,
)

_REFUSALS: dict[int, type[ServiceError]] = {
    engine_pb2.REFUSAL_REASON_ALREADY_EXISTS: RequestExists,
    engine_pb2.REFUSAL_REASON_INVALID: InvalidField,
    engine_pb2.REFUSAL_REASON_QUEUE_FULL: Overloaded,
    engine_pb2.REFUSAL_REASON_UNAVAILABLE: Unavailable,
    engine_pb2.REFUSAL_REASON_UNIMPLEMENTED: UnsupportedField,
    engine_pb2.REFUSAL_REASON_FAILED: GenerationFailed,
}
_FAILURES: dict[int, type[ServiceError]] = {
    engine_pb2.FAILURE_REASON_STEP: GenerationFailed,
    engine_pb2.FAILURE_REASON_REQUEST: GenerationFailed,
    engine_pb2.FAILURE_REASON_BLOCK_MANAGER: Unavailable,
    engine_pb2.FAILURE_REASON_CONSTRAINT: InvalidField,
}
_LATE = {engine_pb2.FAILURE_REASON_DEADLINE: True, engine_pb2.FAILURE_REASON_DEADLINE_QUEUED: False}
_BLAMED = {engine_pb2.FAILURE_REASON_CONSTRAINT: "constraint"}
_REFUSED_HERE_ONLY = (engine_pb2.REFUSAL_REASON_QUEUE_FULL, engine_pb2.REFUSAL_REASON_UNAVAILABLE)


class FailoverReason(Enum):
    """Why another engine has to go on with a request."""

    LOST = "lost"  # the link broke, or the engine said nothing for too long
    DRAINED = "drained"  # it stopped before the request had ended
    NO_KV_MANAGER = "no-kvmanager"  # it was without its KV manager for too long
    REFUSED = "refused"  # its queue is full, it drains, or has the request still from a link that broke


@dataclass(frozen=True)
class Failover:
    """An engine that cannot go on with a request; the error is the client's if no other engine can."""

    reason: FailoverReason
    error: ServiceError


@dataclass
class EventBatch:
    """Events that came together, in the order in which a client is sent them."""

    started: engine_pb2.RequestStarted | None = None
    prompts: list[engine_pb2.PromptScores] = field(default_factory=list)
    token_ids: dict[int, list[int]] = field(default_factory=dict)  # by sample
    logprobs: dict[int, list[decoding_pb2.TokenLogprobs]] = field(default_factory=dict)
    ends: dict[int, engine_pb2.SampleEnd] = field(default_factory=dict)
    finished: engine_pb2.RequestFinished | None = None
    refused: engine_pb2.RequestRefused | None = None

    @classmethod
    def of(cls, events: Sequence[Event]) -> "EventBatch":
        """Sort events."""
        batch = cls()
        for event in events:
            match event:
                case engine_pb2.RequestStarted():
                    batch.started = event
                case engine_pb2.PromptScores():
                    batch.prompts.append(event)
                case engine_pb2.SampleTokens():
                    batch.token_ids.setdefault(event.sample, []).extend(event.token_ids)
                    batch.logprobs.setdefault(event.sample, []).extend(event.logprobs)
                    if event.HasField("end"):
                        batch.ends[event.sample] = event.end
                case engine_pb2.RequestFinished():
                    batch.finished = event
                case engine_pb2.RequestRefused():
                    batch.refused = event
        return batch


def refusal(refused: engine_pb2.RequestRefused) -> Failover:
    """Return what a refusal means where another engine may take the request. Raises what every engine would say."""
    error = _REFUSALS.get(refused.reason, GenerationFailed)(refused.detail, refused.field)
    # Of a first attempt, the id is another request's; of a later one, it may be this one's before the link broke.
    again = refused.reason == engine_pb2.REFUSAL_REASON_ALREADY_EXISTS and refused.attempt > 1
    if again or refused.reason in _REFUSED_HERE_ONLY:
        return Failover(FailoverReason.REFUSED, error)
    raise error


def abandonment(finished: engine_pb2.RequestFinished, open_samples: Sequence[bool]) -> Failover | None:
    """Return why the engine gave up a request, samples of which are still open, though another one could go on."""
    reasons = {end.reason for end, is_open in zip(finished.samples, open_samples, strict=True) if is_open}
    if decoding_pb2.FINISH_REASON_CANCELLED in reasons:
        return Failover(FailoverReason.DRAINED, Unavailable("the engine is shutting down"))
    if finished.failure == engine_pb2.FAILURE_REASON_BLOCK_MANAGER:
        return Failover(FailoverReason.NO_KV_MANAGER, Unavailable(finished.detail))
    return None


def failure(finished: engine_pb2.RequestFinished) -> ServiceError:
    """Return the error of a request that failed."""
    if finished.failure in _LATE:
        return late(began=_LATE[finished.failure])
    kind = _FAILURES.get(finished.failure, GenerationFailed)
    return kind(finished.detail, _BLAMED.get(finished.failure, ""))


def late(*, began: bool) -> DeadlineExceeded:
    """Return the error of a request whose time is over, whoever noticed it; `began`: an engine had begun it."""
    phase = "ran" if began else "waited in the queue"
    return DeadlineExceeded(f"timeout has passed while the request {phase}", "timeout")
