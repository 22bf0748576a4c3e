"""What the gateway shows to Prometheus of its tenants. There are as many as the file of keys names."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.gateway.observe.observer import TenantStats

_LABELS = ("model_name", "tenant")
_KINDS = ("computed", "cached", "generated", "recomputed")


class TenantMetrics(Collector):
    """Looks at the tenants' requests whenever it is scraped."""

    def __init__(self) -> None:
        self._figures: Callable[[], Iterable[TenantStats]] = tuple
        self._rejections: Mapping[str, int] = {}

    def begin(self, figures: Callable[[], Iterable[TenantStats]], rejections: Mapping[str, int]) -> None:
        """Look at these from now on; `rejections` are requests at a tenant's limit, by tenant."""
        self._figures, self._rejections = figures, rejections

    def collect(self) -> Iterator[Metric]:
        """Look at all tenants."""
        requests = CounterMetricFamily(
            "quire_tenant_requests", "Requests of the tenant that an engine was given.", labels=_LABELS
        )
        running = GaugeMetricFamily("quire_tenant_requests_running", "Those of them under way.", labels=_LABELS)
        held = GaugeMetricFamily(
            "quire_tenant_running_tokens",
            "Tokens of the prompts and answers under way: what they would hold of the pool if nothing were shared.",
            labels=_LABELS,
        )
        tokens = CounterMetricFamily(
            "quire_tenant_tokens",
            "Tokens by kind: computed and cached of prompts, generated, and recomputed after preemptions.",
            labels=(*_LABELS, "kind"),
        )
        rejections = CounterMetricFamily(
            "quire_tenant_rejections", "Requests that were refused at a limit of the tenant.", labels=("tenant",)
        )
        for one in self._figures():
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
        """Name what `collect` gives."""
        return self.collect()
