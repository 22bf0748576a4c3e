"""Settings of tracing; traces of requests are in test_logs_and_traces.py."""

import pytest

from services.runtime.settings import InvalidSetting
from services.runtime.tracing.export import create_tracing
from services.runtime.tracing.spans import NO_SPAN, Tracing


def test_without_an_endpoint_nothing_is_recorded() -> None:
    tracing = create_tracing("gateway", "", 1.0)
    assert type(tracing) is Tracing
    span = tracing.start_span("generate", f"00-{'1' * 32}-{'2' * 16}-01")
    assert span is NO_SPAN
    with span.start_child("part") as part:
        part.add_event("something")
    assert part.trace_parent == ""


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "unix:/x", "ftp://127.0.0.1"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^otlp_endpoint must be a URL"):
        create_tracing("gateway", endpoint)
