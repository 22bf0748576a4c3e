"""Tracing with OpenTelemetry's SDK, which sends spans to a collector on its own thread.

Ending a span only adds it to a bounded queue, so a slow or unavailable collector loses spans and delays nothing. The
SDK reads its own environment variables for the resource, the batches, and the exporter's TLS, headers and timeout.
"""

import os
import threading
import time

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.runtime.tracing.spans import NO_ATTRIBUTES, NO_SPAN, Attributes, Span, Tracing

_LAST_SECONDS = 2.0
_NANOSECONDS = 1_000_000_000
_PROPAGATOR = TraceContextTextMapPropagator()


class OtlpTracing(Tracing):
    """Records spans for the collector at a URL; see `services.runtime.tracing.export`."""

    def __init__(self, service: str, endpoint: str, sample_ratio: float) -> None:
        names = {"service.namespace": "quire"}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            names["service.name"] = f"quire-{service}"
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create(names),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("quire")

    def start_span(
        self, name: str, trace_parent: str, attributes: Attributes = NO_ATTRIBUTES, *, at: float | None = None
    ) -> Span:
        """See Tracing."""
        parent = _PROPAGATOR.extract({"traceparent": trace_parent}, Context())
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=_since_1970(at))
        return _Recorded(self._tracer, span) if span.is_recording() else NO_SPAN

    def close(self) -> None:
        """See Tracing. The SDK itself would wait for 30 seconds."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(_LAST_SECONDS)


class _Recorded(Span):
    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        context = span.get_span_context()
        self.trace_id = trace.format_trace_id(context.trace_id)
        self.trace_parent = f"00-{self.trace_id}-{trace.format_span_id(context.span_id)}-{context.trace_flags:02x}"

    def start_child(
        self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at: float | None = None, calls: bool = False
    ) -> Span:
        parent = trace.set_span_in_context(self._span, Context())
        kind = SpanKind.CLIENT if calls else SpanKind.INTERNAL
        span = self._tracer.start_span(name, parent, kind, attributes, start_time=_since_1970(at))
        return _Recorded(self._tracer, span)

    def add_event(self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at: float | None = None) -> None:
        if self._span.is_recording():
            self._span.add_event(name, attributes, _since_1970(at))

    def set_attributes(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def end(self, fault: str = "", *, at: float | None = None) -> None:
        if self._span.is_recording():
            if fault:
                self._span.set_status(Status(StatusCode.ERROR, fault))
            self._span.end(_since_1970(at))


def _since_1970(at: float | None) -> int:
    """Convert a time of `time.monotonic` to nanoseconds since 1970; None is now."""
    now = time.time_ns()
    return now if at is None else now - (time.monotonic_ns() - int(at * _NANOSECONDS))
