"""Counts the requests and tokens of each tenant, including those of requests in flight."""

from collections import Counter

from quire.v1 import gateway_pb2
from services.gateway.fleet.retention import MAX_RETAINED_TENANTS, RETENTION_SECONDS, Retention
from services.gateway.observe.observer import (
    GatewayObserver,
    Inventory,
    RequestInfo,
    RequestObserver,
    RequestProgress,
    TenantStats,
)

_Key = tuple[str, str]  # model and tenant


class TenantUsage(GatewayObserver):
    """Counts requests and tokens by model and tenant; the tenant of a caller without one is empty."""

    def __init__(self) -> None:
        self._in_flight: dict[_Key, set[RequestProgress]] = {}
        self._requests: Counter[_Key] = Counter()
        self._ended: dict[_Key, Counter[str]] = {}
        self._retention = Retention[_Key](RETENTION_SECONDS, max_absent=MAX_RETAINED_TENANTS)

    def on_request(self, request: RequestInfo) -> RequestObserver:
        """Return the observer that counts this request from its submission on."""
        return _RequestUsage(self, (request.model_name, request.origin.caller.tenant))

    def begin(self, key: _Key, progress: RequestProgress) -> None:
        """Count a request in flight."""
        self._requests[key] += 1
        self._ended.setdefault(key, Counter())
        self._in_flight.setdefault(key, set()).add(progress)

    def end(self, key: _Key, progress: RequestProgress) -> None:
        """Add the tokens of a request that has ended."""
        self._in_flight[key].remove(progress)
        self._ended[key] += tokens_by_kind(progress)

    def on_inventory(self, inventory: Inventory, now: float) -> None:
        """Drop the counts of removed tenants and models after their retention."""
        present = {
            (model, tenant)
            for model, tenant in self._requests
            if (model in inventory.models and tenant in inventory.tenants) or self._in_flight[model, tenant]
        }
        for key in self._retention.expired(self._requests, present, now):
            del self._requests[key], self._ended[key], self._in_flight[key]

    def stats(self) -> list[TenantStats]:
        """Return the current counts by model and tenant."""
        return [self._stats_of(key) for key in self._requests]

    def _stats_of(self, key: _Key) -> TenantStats:
        running = self._in_flight[key]
        tokens = sum((tokens_by_kind(progress) for progress in running), Counter(self._ended[key]))
        used = sum(progress.used_tokens() for progress in running)
        return TenantStats(*key, self._requests[key], len(running), used, tokens)


class _RequestUsage(RequestObserver):
    def __init__(self, usage: TenantUsage, key: _Key) -> None:
        self._usage = usage
        self._key = key
        self._progress: RequestProgress | None = None

    def on_submitted(self, progress: RequestProgress) -> None:
        self._progress = progress
        self._usage.begin(self._key, progress)

    def on_ended(self, finished: gateway_pb2.Finished, now: float) -> None:
        del finished, now
        self._end()

    def on_failed(self, error: BaseException, now: float) -> None:
        del error, now
        self._end()

    def _end(self) -> None:
        if self._progress is not None:
            self._usage.end(self._key, self._progress)


def tokens_by_kind(progress: RequestProgress) -> Counter[str]:
    """Return a request's tokens so far by kind. Kinds are disjoint, except that recomputed tokens count again."""
    generated, cached = progress.generated_tokens, progress.cached_tokens
    return Counter(
        computed=progress.used_tokens() - generated - cached,
        cached=cached,
        generated=generated,
        recomputed=progress.recomputed_tokens,
    )
