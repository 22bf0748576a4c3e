"""Metrics of the ends of requests: finished, rejected or aborted."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.v1 import gateway_pb2_grpc
from services.gateway.access.api_keys import make_key
from tests.api_keys import Keyed, write_keys
from tests.load import prompt_request, slow_request
from tests.running_quire import CALL_SECONDS, RunningQuire, RunningService
from tests.scrape import Scrape
from tests.services.test_metrics import LONG, difference, quiet, quiet_with_series, scrape


def test_rejections_are_counted_by_reason(
    tiny_quire: RunningQuire, service: Callable[..., RunningService], tmp_path: Path
) -> None:
    single, frugal = make_key(), make_key()
    limits = {single: "max_concurrent_requests = 1", frugal: "tokens_per_minute = 20"}
    entries = {key: f"tenant = '{number}'\n{limit}" for number, (key, limit) in enumerate(limits.items())}
    keys = write_keys(tmp_path / "keys.toml", entries)
    gateway = service(
        *("gateway", "--listen", "127.0.0.1:0", "--engines", tiny_quire.addresses["engine"]),
        *("--api-keys", str(keys), "--max-requests", "2"),
    )
    gateway.output.wait_for("gateway is ready")
    one, other = (Keyed(gateway.address, key) for key in limits)

    def reasons() -> dict[str, float]:
        return Scrape.of(gateway.metrics_url).values("quire_admission_rejections_total", "reason")

    def refused(client: Any, max_tokens: int) -> str | None:
        before = reasons()
        try:
            list(client.Generate(prompt_request("refused", max_tokens), timeout=CALL_SECONDS))
        except grpc.RpcError:
            after = reasons()
            (reason,) = [reason for reason, count in after.items() if count != before.get(reason, 0)]
            assert after[reason] == before.get(reason, 0) + 1
            return reason
        return None

    assert refused(gateway_pb2_grpc.GatewayStub(gateway.channel), 5) == "unauthenticated"
    call = one.gateway.Generate(slow_request("runs", LONG), timeout=CALL_SECONDS)
    next(call)
    assert refused(one.gateway, 5) == "tenant_requests"
    call.cancel()
    list(other.gateway.Generate(prompt_request("runs", 9), timeout=CALL_SECONDS))
    assert refused(other.gateway, 19) == "tenant_tokens"
    one.close()
    other.close()


def test_rejections_without_an_engine_have_no_model(service: Callable[..., RunningService]) -> None:
    gateway = service("gateway", "--listen", "127.0.0.1:0", "--engines", "127.0.0.1:1")
    request = prompt_request("no engine", 5)
    request.model = "made-up"
    with pytest.raises(grpc.RpcError):
        list(gateway_pb2_grpc.GatewayStub(gateway.channel).Generate(request, timeout=CALL_SECONDS))
    shown = Scrape.of(gateway.metrics_url)
    (sample,) = [sample for sample in shown.samples if sample.name == "quire_admission_rejections_total"]
    assert (sample.labels, sample.value) == ({"model_name": "", "reason": "unavailable"}, 1)


def cancel(quire: RunningQuire) -> None:
    call = quire.gateway.Generate(slow_request("cancelled", LONG))
    next(call)
    call.cancel()


def let_the_call_expire(quire: RunningQuire) -> None:
    with suppress(grpc.RpcError):
        quire.generate(slow_request("late", LONG), timeout=1)


def let_the_timeout_expire(quire: RunningQuire) -> None:
    request = slow_request("late", LONG)
    request.timeout.FromMilliseconds(500)
    with suppress(grpc.RpcError):
        quire.generate(request)


def reasons_of_ends(quire: RunningQuire, before: Scrape) -> dict[str, float]:
    """Wait until all requests have ended, and return their count since `before` by reason."""
    quiet(quire)
    after = scrape(quire, "gateway")
    name, ends = "quire_request_success_total", ("stop", "length", "abort", "error")
    return {reason: difference(name, before, after, finished_reason=reason) for reason in ends}


@pytest.mark.parametrize("abort", [cancel, let_the_call_expire, let_the_timeout_expire])
def test_a_request_of_a_disconnected_client_counts_as_aborted(
    tiny_quire: RunningQuire, abort: Callable[[RunningQuire], None]
) -> None:
    quiet_with_series(tiny_quire)
    before = scrape(tiny_quire, "gateway")
    abort(tiny_quire)
    assert reasons_of_ends(tiny_quire, before)["abort"] == 1
    after = scrape(tiny_quire, "gateway")
    assert difference("quire_e2e_request_latency_seconds_count", before, after) == 0


def test_an_invalid_request_is_not_counted(tiny_quire: RunningQuire) -> None:
    quiet_with_series(tiny_quire)
    before = scrape(tiny_quire, "gateway")
    with pytest.raises(grpc.RpcError):
        tiny_quire.generate(prompt_request("too long " * 1000, 5))
    assert reasons_of_ends(tiny_quire, before) == {"stop": 0, "length": 0, "abort": 0, "error": 0}
    assert difference("quire_e2e_request_latency_seconds_count", before, scrape(tiny_quire, "gateway")) == 0


def test_a_stop_string_counts_as_stop(tiny_quire: RunningQuire) -> None:
    text = tiny_quire.generate(prompt_request("What follows", 20)).text
    before = scrape(tiny_quire, "gateway")
    request = prompt_request("What follows", 20)
    request.stopping.stop_strings.append(text[5:8])
    tiny_quire.generate(request)
    after = scrape(tiny_quire, "gateway")
    assert difference("quire_request_success_total", before, after, finished_reason="stop") == 1
