"""Exports the spans of a process to a collector, if one is set."""

from services.runtime.addresses import check_url
from services.runtime.settings import InvalidSetting
from services.runtime.tracing.spans import Tracing

OTLP_ENDPOINT = "URL of an OpenTelemetry collector (gRPC), such as http://127.0.0.1:4317. Empty: no traces."


def create_tracing(service: str, endpoint: str, sample_ratio: float = 0.0) -> Tracing:
    """Return tracing to the collector at `endpoint`, or tracing that records nothing if it is empty.

    Spans with a parent in another process are recorded if that one is. `sample_ratio` is the fraction of recorded
    traces that begin here. Raises InvalidSetting.
    """
    if not endpoint:
        return Tracing()
    check_url("otlp_endpoint", endpoint)
    try:
        from services.runtime.tracing.otlp import OtlpTracing
    except ImportError as error:
        missing = f"otlp_endpoint is set, but {error.name} is not installed: pip install 'quire[tracing]'"
        raise InvalidSetting(missing) from error
    return OtlpTracing(service, endpoint, sample_ratio)
