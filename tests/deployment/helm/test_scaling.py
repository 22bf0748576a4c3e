"""Autoscalers and disruption budgets."""

import re

import pytest

from tests.deployment.helm.chart import (
    CI_VALUES,
    Object,
    by_name,
    ci,
    deployments,
    merged,
    of_kind,
    only,
    pods,
    render,
    render_ci,
)
from tests.services.test_metrics import SHOWN


def metrics_in(objects: list[Object]) -> set[str]:
    """Return the names of Quire's metrics in autoscalers."""
    found = set()
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        found |= {one["pods"]["metric"]["name"] for one in scaler["spec"]["metrics"] if one["type"] == "Pods"}
    for scaler in of_kind(objects, "ScaledObject"):
        found |= {
            name for one in scaler["spec"]["triggers"] for name in re.findall(r"quire_\w+", one["metadata"]["query"])
        }
    return found


@pytest.mark.parametrize(("name", "count"), [("ha", 2), ("keda", 2), ("models", 1)])
def test_autoscalers_use_metrics_that_engines_export(name: str, count: int) -> None:
    metrics = metrics_in(render_ci(name))
    assert len(metrics) == count
    assert metrics <= SHOWN["engine"].keys()


def test_hpas_scale_engines_by_requests_and_gateways_by_cpu() -> None:
    scalers = {name: item["spec"] for name, item in by_name(render_ci("ha"), "HorizontalPodAutoscaler").items()}
    targets = {metric["pods"]["metric"]["name"]: metric["pods"]["target"] for metric in scalers["engine"]["metrics"]}
    assert targets == {
        "quire_num_requests_waiting": {"type": "AverageValue", "averageValue": "4"},
        "quire_num_requests_running": {"type": "AverageValue", "averageValue": "48"},
    }
    (metric,) = scalers["gateway"]["metrics"]
    assert metric["resource"] == {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}
    bounds = {name: (spec["minReplicas"], spec["maxReplicas"]) for name, spec in scalers.items()}
    assert bounds == {"engine": (2, 8), "gateway": (3, 6)}
    assert scalers["engine"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300


def test_an_autoscaler_scales_an_existing_workload_without_replicas() -> None:
    for name in CI_VALUES:
        objects = render_ci(name)
        scalers = [*of_kind(objects, "HorizontalPodAutoscaler"), *of_kind(objects, "ScaledObject")]
        targets = [item["spec"]["scaleTargetRef"]["name"].removeprefix("blue-quire-") for item in scalers]
        assert len(targets) == len(set(targets))
        scalable = {**deployments(objects), **by_name(objects, "LeaderWorkerSet")}
        without = {found for found, item in scalable.items() if "replicas" not in item["spec"]}
        assert set(targets) == without


def test_keda_queries_the_sum_over_the_pods_of_one_deployment() -> None:
    spec = only(render_ci("keda"), "ScaledObject")["spec"]
    waiting = next(one for one in spec["triggers"] if "waiting" in one["metadata"]["query"])
    assert waiting["metadata"] == {
        "serverAddress": "http://prometheus.monitoring:9090",
        "query": 'sum(quire_num_requests_waiting{namespace="llm", engine=~"blue-quire-engine-[a-z0-9]+-[a-z0-9]+"})',
        "threshold": "4",
        "ignoreNullValues": "false",
    }
    assert waiting["metricType"] == "AverageValue"
    assert waiting["authenticationRef"] == {"name": "prometheus"}
    assert spec["fallback"] == {"failureThreshold": 3, "replicas": 3, "behavior": "currentReplicasIfHigher"}
    fallback = only(render_ci("models"), "ScaledObject")["spec"]["fallback"]
    assert fallback["replicas"] == 1, "defaults to minReplicas"


@pytest.mark.parametrize(
    ("release", "pod", "is_counted"),
    [
        ("blue", "blue-quire-engine-a-5d9c8b7f64-x2x9z", True),
        ("blue", "blue-quire-engine-a-b-5d9c8b7f64-x2x9z", False),
        ("blue", "blue-quire-engine-5d9c8b7f64-x2x9z", False),
        ("blue", "green-quire-engine-a-5d9c8b7f64-x2x9z", False),
    ],
)
def test_keda_counts_the_pods_of_its_own_model_alone(release: str, pod: str, is_counted: bool) -> None:
    models = [{"name": name, "model": f"org/{name}"} for name in ("a", "a-b")]
    values = {"models": models, "engine": ci("keda")["engine"]}
    scaler = of_kind(render(values, release=release), "ScaledObject")[0]
    pattern = re.search(r'engine=~"([^"]*)"', scaler["spec"]["triggers"][0]["metadata"]["query"])[1]
    assert bool(re.fullmatch(pattern, pod)) is is_counted


# Budgets


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ha", {"engine": {"maxUnavailable": 1}, "gateway": {"minAvailable": "50%"}}),
        ("models", {"engine-large": {"maxUnavailable": 1}}),
        ("default", {}),
    ],
)
def test_a_budget_is_for_the_pods_of_one_deployment(name: str, expected: dict[str, Object]) -> None:
    objects = render_ci(name)
    budgets = by_name(objects, "PodDisruptionBudget")
    bounds = {
        found: {key: value for key, value in item["spec"].items() if key.endswith("vailable")}
        for found, item in budgets.items()
    }
    assert bounds == expected
    for found, item in budgets.items():
        selector = item["spec"]["selector"]["matchLabels"]
        selected = [one for one, pod in pods(objects).items() if selector.items() <= pod["metadata"]["labels"].items()]
        assert selected == [found]


def test_a_disruption_budget_of_zero_is_rendered() -> None:
    budget = {"engine": {"podDisruptionBudget": {"enabled": True, "minAvailable": 0}}}
    assert only(render(merged(ci("default"), budget)), "PodDisruptionBudget")["spec"]["minAvailable"] == 0
