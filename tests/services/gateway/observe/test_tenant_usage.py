"""What tenants use is counted apart, while their requests run and after."""

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tests.api_keys import Keyed, write_keys
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire, start_quire
from tests.scrape import Scrape
from tests.timing import standing_still

PROMPT = "the same beginning, of which whole blocks are cached, and then"


@pytest.fixture(scope="module")
def quire(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningQuire, Keyed, Keyed]]:
    """One with two tenants, the second of which may have one request at a time."""
    entries = {"a" * 32: 'tenant = "acme"', "b" * 32: 'tenant = "zeta"\nmax_concurrent_requests = 1'}
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys.toml", entries)
    pool = ("--device-blocks", "256", "--link-timeout-seconds", "120")
    one = start_quire("--model", str(tiny_model("llama")), *pool, "--api-keys", str(keys))
    clients = [Keyed(one.addresses["gateway"], key) for key in entries]
    yield one, clients[0], clients[1]
    for client in clients:
        client.close()
    assert one.close() == 0


def test_requests_and_tokens_are_counted_by_tenant_while_they_run_and_after(
    quire: tuple[RunningQuire, Keyed, Keyed],
) -> None:
    one, acme, zeta = quire
    usages = [
        Answer.of(acme.gateway.Generate(prompt_request(f"{PROMPT} {n}", 9), timeout=CALL_SECONDS)).finished.usage
        for n in range(3)
    ]
    call = zeta.gateway.Generate(prompt_request(PROMPT, 1900), timeout=CALL_SECONDS)
    started = next(call).started
    generated = 0
    while generated < 20:
        generated += len(next(call).delta.token_ids)
    with standing_still(one.children()["engine"]):  # else it could come to its end meanwhile
        with pytest.raises(grpc.RpcError) as refused:
            list(zeta.gateway.Generate(prompt_request("one too many", 2), timeout=CALL_SECONDS))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        shown = Scrape.of(one.metrics_urls["gateway"])
    assert shown.values("quire_tenant_requests_running", "tenant") == {"acme": 0, "zeta": 1}
    running = shown.values("quire_tenant_running_tokens", "tenant")
    assert running["acme"] == 0
    assert running["zeta"] >= started.prompt_tokens + generated
    assert shown.values("quire_tenant_tokens_total", "kind", tenant="acme") == {
        "computed": sum(usage.prompt_tokens - usage.cached_tokens for usage in usages),
        "cached": sum(usage.cached_tokens for usage in usages),
        "generated": 27,
        "recomputed": 0,
    }
    assert shown.value("quire_tenant_tokens_total", tenant="acme", kind="cached") > 0
    assert shown.values("quire_tenant_rejections_total", "tenant") == {"zeta": 1}

    call.cancel()
    wait_until(lambda: running_requests(one)["zeta"] == 0, "the gateway has heard of it")
    shown = Scrape.of(one.metrics_urls["gateway"])
    assert shown.values("quire_tenant_requests_total", "tenant") == {"acme": 3, "zeta": 1}
    assert shown.values("quire_tenant_running_tokens", "tenant") == {"acme": 0, "zeta": 0}
    assert shown.value("quire_tenant_tokens_total", tenant="zeta", kind="generated") >= generated


def running_requests(quire: RunningQuire) -> dict[str, float]:
    return Scrape.of(quire.metrics_urls["gateway"]).values("quire_tenant_requests_running", "tenant")


def test_what_preemptions_cost_is_counted_for_the_tenant_that_pays(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys.toml", {"a" * 32: 'tenant = "acme"'})
    one = start_quire("--model", str(tiny_model("llama")), "--device-blocks", "12", "--api-keys", str(keys))
    client = Keyed(one.addresses["gateway"], "a" * 32)
    recomputed = 0
    for _ in range(5):  # where none of them meets another, nothing is preempted
        calls = [
            client.gateway.Generate(prompt_request(f"prompt number {n} of many", 100), timeout=CALL_SECONDS)
            for n in range(8)
        ]
        recomputed += sum(Answer.of(call).finished.usage.recomputed_tokens for call in calls)
        if recomputed:
            break
    shown = Scrape.of(one.metrics_urls["gateway"])
    client.close()
    assert one.close() == 0
    assert shown.value("quire_tenant_tokens_total", tenant="acme", kind="recomputed") == recomputed > 0
