"""What the requests of each tenant use: while they are under way it is looked at in their progress."""

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
    """Counts requests and their tokens by tenant; a caller without a tenant counts under an empty name."""

    def __init__(self) -> None:
        self._under_way: dict[_Key, set[RequestProgress]] = {}
        self._requests: Counter[_Key] = Counter()
        self._ended: dict[_Key, Counter[str]] = {}
        self._departures = Retention[_Key](RETENTION_SECONDS, most=MAX_RETAINED_TENANTS)

    def on_request(self, request: RequestInfo) -> RequestObserver:
        """Count it once an engine was given it."""
        return _RequestUsage(self, (request.model_name, request.origin.caller.tenant))

    def begin(self, key: _Key, progress: RequestProgress) -> None:
        """Count a request, and look at its tokens from now on."""
        self._requests[key] += 1
        self._ended.setdefault(key, Counter())
        self._under_way.setdefault(key, set()).add(progress)

    def end(self, key: _Key, progress: RequestProgress) -> None:
        """Keep what a request has used."""
        self._under_way[key].remove(progress)
        self._ended[key] += tokens_by_kind(progress)

    def on_inventory(self, inventory: Inventory, now: float) -> None:
        """Forget what tenants used that are gone, or models, a while after that."""
        kept = {
            (model, tenant)
            for model, tenant in self._requests
            if (model in inventory.models and tenant in inventory.tenants) or self._under_way[model, tenant]
        }
        for key in self._departures.due(self._requests, kept, now):
            del self._requests[key], self._ended[key], self._under_way[key]

    def figures(self) -> list[TenantStats]:
        """Return how it stands, by model and tenant."""
        return [self._figures(key) for key in self._requests]

    def _figures(self, key: _Key) -> TenantStats:
        running = self._under_way[key]
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
    """Return what a request has used so far; no token is of two kinds, but those computed again were so before."""
    generated, cached = progress.generated_tokens, progress.cached_tokens
    return Counter(
        computed=progress.used_tokens() - generated - cached,
        cached=cached,
        generated=generated,
        recomputed=progress.recomputed_tokens,
    )
