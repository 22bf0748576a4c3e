import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from bench.loads.null_engine import NullOptions
from quire.v1 import gateway_pb2
from services.gateway.access.api_keys import TenantLimits
from services.gateway.access.callers import Caller, Origin
from services.gateway.observe.metrics import GatewayMetrics
from services.runtime.errors import Overloaded
from tests.load import prompt_request
from tests.services.gateway.handler_in_process import (
    MODEL,
    TOKENS,
    HandlerInProcess,
    handler_in_process,
    kv_manager,
    null_engine,
    running_handler,
)

PROMPT = "the same prefix, of which whole blocks are cached, and then"
ACME, ZETA = (Origin(Caller(tenant, operator=False)) for tenant in ("acme", "zeta"))


async def finished(one: HandlerInProcess, origin: Origin, text: str, tokens: int) -> gateway_pb2.Finished:
    responses = [response async for response in one.handler.generate(prompt_request(text, tokens), origin)]
    return responses[-1].finished


def exporting(one: HandlerInProcess) -> Callable[..., float | None]:
    """Export the tenants' metrics; return a function that reads a sample by name, tenant and further labels."""
    metrics = GatewayMetrics()
    metrics.on_tenants(one.usage.stats, one.tenants.rejections)

    def value(name: str, tenant: str, **labels: str) -> float | None:
        by_model = {} if name == "rejections_total" else {"model_name": MODEL}
        return metrics.registry.get_sample_value(f"quire_tenant_{name}", {"tenant": tenant, **by_model, **labels})

    return value


def test_requests_and_tokens_are_counted_by_tenant_during_and_after_requests(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    async def run() -> None:
        async with handler_in_process(tmp_path, tiny_model("llama"), seconds_per_token=2e-3) as one:
            value = exporting(one)
            one.tenants.set_limits({"acme": TenantLimits(), "zeta": TenantLimits(max_concurrent_requests=1)})
            usages = [(await finished(one, ACME, f"{PROMPT} {n}", 9)).usage for n in range(3)]
            async with aclosing(one.handler.generate(prompt_request(PROMPT, 5000), ZETA)) as responses:
                started, generated = (await anext(responses)).started, 0
                while generated < 20:
                    generated += len((await anext(responses)).delta.token_ids)
                with pytest.raises(Overloaded):
                    await finished(one, ZETA, "above the limit", 2)
                assert [value("requests_running", tenant) for tenant in ("acme", "zeta")] == [0, 1]
                assert value("running_tokens", "acme") == 0
                assert value("running_tokens", "zeta") == started.prompt_tokens + generated
                cached = sum(usage.cached_tokens for usage in usages)
                assert {kind: value("tokens_total", "acme", kind=kind) for kind in ("cached", "generated")} == {
                    "cached": cached,
                    "generated": 27,
                }
                assert (
                    value("tokens_total", "acme", kind="computed") == sum(one.prompt_tokens for one in usages) - cached
                )
                assert cached > 0
                assert [value("rejections_total", tenant) for tenant in ("acme", "zeta")] == [None, 1]
            assert [value("requests_total", tenant) for tenant in ("acme", "zeta")] == [3, 1]
            assert [value("running_tokens", tenant) for tenant in ("acme", "zeta")] == [0, 0]
            assert value("tokens_total", "zeta", kind="generated") == generated

    asyncio.run(run())


def test_recomputed_tokens_are_counted_for_the_tenant_of_the_preempted_request(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    options = NullOptions(2048, 384, token_id=100, microseconds_per_token=500)

    async def run() -> None:
        async with (
            kv_manager(tmp_path),
            null_engine(tmp_path, tiny_model("llama"), "one", options, device_blocks=12) as address,
            running_handler(tmp_path, address, GatewayMetrics(), 1) as one,
        ):
            value = exporting(one)
            one.tenants.set_limits({"acme": TenantLimits(tokens_per_minute=TOKENS)})
            ends = await asyncio.gather(*(finished(one, ACME, f"prompt number {n} of many", 100) for n in range(8)))
            recomputed = sum(end.usage.recomputed_tokens for end in ends)
            assert value("tokens_total", "acme", kind="recomputed") == recomputed > 0

    asyncio.run(run())
