"""A collector of OpenTelemetry traces over gRPC; tests wait for the spans of a trace."""

import threading
import time
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

_HOST = "127.0.76.67"


@dataclass(frozen=True)
class SpanEvent:
    """Something that happened within a span, in seconds since 1970."""

    name: str
    at: float
    attributes: dict[str, Any]


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it was exported; times are in seconds since 1970."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    begun: float
    ended: float
    fault: str
    attributes: dict[str, Any] = field(hash=False)
    events: tuple[SpanEvent, ...] = field(hash=False)

    def event(self, name: str) -> SpanEvent:
        (one,) = (event for event in self.events if event.name == name)
        return one


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on loopback at a port that stays free after a close."""

    def __init__(self) -> None:
        self._spans: list[CollectedSpan] = []
        self._news = threading.Condition()
        self._port = 0
        self.open()

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self._port}"

    def open(self) -> None:
        """Listen, after a close at the same port."""
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"{_HOST}:{self._port}")
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        found = [
            _collected(resource, span)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._news:
            self._spans += found
            self._news.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def all_spans(self) -> list[CollectedSpan]:
        with self._news:
            return list(self._spans)

    def wait_for(self, trace_id: str, *names: str, seconds: float = 60) -> list[CollectedSpan]:
        """Return the spans of a trace once each of these names is among them, as often as it is given."""
        deadline = time.monotonic() + seconds
        with self._news:
            while True:
                found = sorted((one for one in self._spans if one.trace_id == trace_id), key=lambda one: one.begun)
                came = [span.name for span in found]
                if all(came.count(name) >= names.count(name) for name in names):
                    return found
                if not self._news.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"of {names} only {came} came")

    def close(self) -> None:
        self._server.stop(grace=None).wait()


def _collected(resource: trace_pb2.ResourceSpans, span: trace_pb2.Span) -> CollectedSpan:
    return CollectedSpan(
        service=_values(resource.resource.attributes)["service.name"],
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begun=span.start_time_unix_nano / 1e9,
        ended=span.end_time_unix_nano / 1e9,
        fault=span.status.message if span.status.code == trace_pb2.Status.STATUS_CODE_ERROR else "",
        attributes=_values(span.attributes),
        events=tuple(SpanEvent(one.name, one.time_unix_nano / 1e9, _values(one.attributes)) for one in span.events),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)
