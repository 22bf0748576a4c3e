"""The gateway's Prometheus metrics by tenant. The file of API keys bounds the number of tenants."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.gateway.observe.observer import TenantStats

_LABELS = ("model_name", "tenant")
_KINDS = ("computed", "cached", "generated", "recomputed")


class TenantMetrics(Collector):
    """Collects the tenants' statistics at each scrape."""

    def __init__(self) -> None:
        self._stats: Callable[[], Iterable[TenantStats]] = tuple
        self._rejections: Mapping[str, int] = {}

    def set_sources(self, stats: Callable[[], Iterable[TenantStats]], rejections: Mapping[str, int]) -> None:
        """Set the sources; `rejections` counts requests rejected at a tenant's limit, by tenant."""
        self._stats, self._rejections = stats, rejections

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of all tenants."""
        requests = CounterMetricFamily("quire_tenant_requests", "Submitted requests of the tenant.", labels=_LABELS)
        running = GaugeMetricFamily(
            "quire_tenant_requests_running", "Requests of the tenant in flight.", labels=_LABELS
        )
        held = GaugeMetricFamily(
            "quire_tenant_running_tokens",
            "Tokens of the tenant's running requests: what they would hold of the pool without prefix sharing.",
            labels=_LABELS,
        )
        tokens = CounterMetricFamily(
            "quire_tenant_tokens",
            "Tokens by kind: computed and cached of prompts, generated, and recomputed after preemptions.",
            labels=(*_LABELS, "kind"),
        )
        rejections = CounterMetricFamily(
            "quire_tenant_rejections", "Requests rejected at a limit of the tenant.", labels=("tenant",)
        )
        for one in self._stats():
            labels = [one.model_name, one.tenant]
            requests.add_metric(labels, one.requests)
            running.add_metric(labels, one.running)
            held.add_metric(labels, one.running_tokens)
            for kind in _KINDS:
                tokens.add_metric([*labels, kind], one.tokens[kind])
        for tenant, count in self._rejections.items():
            rejections.add_metric([tenant], count)
        yield from (requests, running, held, tokens, rejections)

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without waiting for a scrape, as the registry requires."""
        return self.collect()
