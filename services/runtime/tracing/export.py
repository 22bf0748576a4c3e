"""Chooses where the spans of a process go: to a collector, or nowhere."""

from services.runtime.settings import InvalidSetting
from services.runtime.tracing.spans import Tracing

OTLP_ENDPOINT = (
    "URL of a collector that takes OpenTelemetry's traces over gRPC, such as http://127.0.0.1:4317. Empty: no traces."
)


def create_tracing(service: str, endpoint: str, sample_ratio: float = 0.0) -> Tracing:
    """Return what records traces for the collector at `endpoint`; where that is empty, what records none.

    A span whose parent is another process's is recorded if that one is; without a parent, this fraction of them is.
    Raises InvalidSetting.
    """
    if not endpoint:
        return Tracing()
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidSetting(f"otlp_endpoint is {endpoint!r}, it must be a URL, http://host:port or https://host:port")
    try:
        from services.runtime.tracing.otlp import OtlpTracing
    except ImportError as error:
        missing = f"otlp_endpoint is given, but {error.name} is not installed: pip install 'quire[tracing]'"
        raise InvalidSetting(missing) from error
    return OtlpTracing(service, endpoint, sample_ratio)
