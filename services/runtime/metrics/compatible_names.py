"""Exports metrics under vLLM's names in addition to their own."""

from collections.abc import Iterable, Iterator

from prometheus_client import Metric

from services.runtime.metrics.vllm_names import COUNTERPARTS, Counterpart

_BY_NAME = {counterpart.ours: counterpart for counterpart in COUNTERPARTS if not counterpart.shown_by_engine}


def with_counterparts(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """Yield all metrics, and those that vLLM has again under each of vLLM's names.

    The engine yields those that only its page shows under vLLM's names.
    """
    for metric in metrics:
        yield metric
        if counterpart := _BY_NAME.get(metric.name):
            for name in counterpart.theirs:
                yield _renamed(metric, name, counterpart)


def _renamed(metric: Metric, name: str, counterpart: Counterpart) -> Metric:
    renamed = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        if (labels := counterpart.translated(sample.labels)) is not None:
            suffix = sample.name.removeprefix(metric.name)
            renamed.samples.append(sample._replace(name=name + suffix, labels=labels))
    return renamed
