"""Reports of ended requests: a line of the log, and the engine's part of the trace.

Neither contains text or tokens of prompts and outputs, only their lengths.
"""

import logging
from typing import Any

from engine.errors import RequestRefused
from engine.schedule.sequence_group import Group
from quire.v1 import decoding_pb2, engine_pb2
from services.runtime.tracing.spans import NO_SPAN, Span, Tracing

_DIGITS = 6  # of seconds

log = logging.getLogger("quire.engine.requests")


class RequestReports:
    """Reports an engine's requests, on its thread unless noted otherwise. Times are those of the engine's clock."""

    def __init__(self, model: str, engine_id: str, tracing: Tracing) -> None:
        self._own = {"model": model, "engine": engine_id}
        self._tracing = tracing
        self._spans: dict[str, Span] = {}
        self.trace_parents: dict[str, str] = {}  # of traced requests, for their block operations

    def on_queued(self, submission: engine_pb2.Submission, at: float) -> None:
        """A request entered the queue; it reached the engine at this time."""
        if submission.trace_parent and (span := self._span(submission, at)) is not NO_SPAN:
            self._spans[submission.request_id] = span
            self.trace_parents[submission.request_id] = span.trace_parent

    def on_refused(self, submission: engine_pb2.Submission, refused: RequestRefused, at: float) -> None:
        """A request was refused. Called on any thread."""
        reason = type(refused).__name__
        span = self._span(submission, at)
        self._log(submission, span, {"status": "refused", "reason": reason, "field": refused.field})
        span.end(reason)

    def on_ended_before_queue(
        self, submission: engine_pb2.Submission, finished: engine_pb2.RequestFinished, at: float
    ) -> None:
        """A request ended before it entered the queue. Called on any thread."""
        span = self._span(submission, at)
        ended = {"status": "ended", **_of_message(finished), "prompt_tokens": len(submission.prompt_token_ids)}
        self._log(submission, span, ended)
        span.end(_failure(finished))

    def on_ended(self, group: Group, finished: engine_pb2.RequestFinished, submitted_at: float) -> None:
        """A request in the queue or in the schedule ended."""
        span = self._spans.pop(group.request.request_id, NO_SPAN)
        self.trace_parents.pop(group.request.request_id, None)
        counted = {
            "prompt_tokens": len(group.request.prompt),
            "cached_tokens": group.stats.cached_tokens,
            "generation_tokens": group.generated,
            "held_blocks": group.stats.held_blocks,
        }
        self._log(finished, span, {"status": "ended", **_of_message(finished), **counted})
        if span is not NO_SPAN:
            _describe(span, group, submitted_at)
            span.set_attributes({"gen_ai.response.model": self._own["model"], "quire.engine": self._own["engine"]})
            span.end(_failure(finished))

    def _span(self, submission: engine_pb2.Submission, at: float) -> Span:
        if not submission.trace_parent:
            return NO_SPAN
        attributes: dict[str, Any] = {
            "gen_ai.request.id": submission.request_id,
            "gen_ai.request.max_tokens": submission.stopping.max_tokens,
            "gen_ai.request.n": submission.sampling.sample_count,
            "gen_ai.request.temperature": submission.sampling.temperature,
            "gen_ai.request.top_p": submission.sampling.top_p,
            "quire.attempt": submission.attempt,
        }
        return self._tracing.start_span("llm_request", submission.trace_parent, attributes, at=at)

    def _log(
        self, about: engine_pb2.Submission | engine_pb2.RequestFinished, span: Span, fields: dict[str, Any]
    ) -> None:
        if log.isEnabledFor(logging.INFO):
            named = {"request_id": about.request_id, "attempt": about.attempt, **self._own, **fields}
            log.info("request ended", extra={**named, "trace_id": span.trace_id} if span.trace_id else named)


def _of_message(finished: engine_pb2.RequestFinished) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "finish_reason": ",".join(dict.fromkeys(_finish_reason(sample) for sample in finished.samples)),
        "queue_seconds": _seconds(finished, "queued"),
        "prefill_seconds": _seconds(finished, "prefill"),
        "decode_seconds": _seconds(finished, "decode"),
        "preemptions": finished.preemptions,
        "recomputed_tokens": finished.recomputed_tokens,
        "swapped_tokens": finished.swapped_tokens,
    }
    return fields | ({"failure": failure} if (failure := _failure(finished)) else {})


def _finish_reason(sample: engine_pb2.SampleEnd) -> str:
    return decoding_pb2.FinishReason.Name(sample.reason).removeprefix("FINISH_REASON_").lower()


def _failure(finished: engine_pb2.RequestFinished) -> str:
    if finished.failure == engine_pb2.FAILURE_REASON_UNSPECIFIED:
        return ""
    return engine_pb2.FailureReason.Name(finished.failure).removeprefix("FAILURE_REASON_").lower()


def _seconds(finished: engine_pb2.RequestFinished, name: str) -> float:
    seconds: float = getattr(finished, name).ToTimedelta().total_seconds()
    return round(seconds, _DIGITS)


def _describe(span: Span, group: Group, submitted_at: float) -> None:
    """Add a request's times and preemptions, and the attributes of vLLM's spans under vLLM's names."""
    stats = group.stats
    scheduled, first, last = stats.scheduled_at, stats.first_token_at, stats.last_token_at
    span.start_child("queue", at=submitted_at).end(at=scheduled)
    if scheduled is not None:
        span.start_child("prefill", {"quire.cached_tokens": group.stats.cached_tokens}, at=scheduled).end(at=first)
        span.set_attributes({"gen_ai.latency.time_in_queue": scheduled - submitted_at})
    if first is not None and last is not None:
        span.add_event("first token", at=first)
        span.start_child("decode", at=first).end(at=last)
        span.set_attributes({"gen_ai.latency.time_to_first_token": first - submitted_at})
        span.set_attributes({"gen_ai.latency.time_in_model_decode": last - first})
        if scheduled is not None:
            span.set_attributes({"gen_ai.latency.time_in_model_prefill": first - scheduled})
    for at in stats.preempted_at:
        span.add_event("preempted", at=at)
    for at in stats.resumed_at:
        span.add_event("resumed", at=at)
    span.set_attributes(
        {
            "gen_ai.usage.prompt_tokens": len(group.request.prompt),
            "gen_ai.usage.completion_tokens": group.generated,
            "gen_ai.usage.num_sequences": len(group.samples),
            "quire.cached_tokens": group.stats.cached_tokens,
            "quire.preemptions": stats.preemptions,
            "quire.recomputed_tokens": stats.recomputed_tokens,
        }
    )
