"""Ranks of one engine: in one pod, or in several pods of a LeaderWorkerSet."""

import json

import pytest
from kubernetes_validate import utils as kubernetes
from torch.distributed.run import get_args_parser

from tests.deployment.helm.chart import (
    PORTS,
    Object,
    by_name,
    component_of,
    containers,
    deployments,
    merged,
    of_kind,
    only,
    parse,
    refusal,
    render,
    render_ci,
    variables,
)

# Without another grace: the default fits into the 30 s after which torchrun kills its processes.
TWO_PODS = {"engine": {"settings": {"tensor_parallel": 4}, "ranks": {"pods": 2}}}


def templates(objects: list[Object]) -> tuple[Object, Object]:
    """Return the templates of the first pod of a group and of its other pods."""
    group = only(objects, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    return group["leaderTemplate"], group["workerTemplate"]


@pytest.mark.parametrize(("name", "ranks"), [("two-gpus", 2), ("eight-gpus", 8)])
def test_ranks_of_one_pod_have_a_gpu_each(name: str, ranks: int) -> None:
    engine = containers(render_ci(name))["engine"]
    assert variables(engine)["QUIRE_ENGINE_TENSOR_PARALLEL"] == str(ranks)
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": ranks}


def test_ranks_of_several_pods_are_a_group_that_is_replaced_together() -> None:
    objects = render(TWO_PODS)
    assert "engine" not in deployments(objects)
    spec = only(objects, "LeaderWorkerSet")["spec"]
    assert spec["replicas"] == 1
    assert spec["leaderWorkerTemplate"]["size"] == 2
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxSurge": 0, "maxUnavailable": 1}


@pytest.mark.parametrize("version", ["1.27", "1.34"])
def test_the_pods_of_a_group_are_valid(version: str) -> None:
    for template in templates(render_ci("two-pods")):
        item = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        assert kubernetes.validate(item, version, strict=True) == kubernetes.major_minor(version)


def test_torchrun_starts_the_ranks_of_each_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    for template in templates(render(merged(TWO_PODS, {"engine": {"ranks": {"port": 29600}}}))):
        (container,) = template["spec"]["containers"]
        assert container["command"] == ["torchrun"]
        given = [argument.replace("$(LWS_WORKER_INDEX)", "1") for argument in container["args"]]
        options = get_args_parser().parse_args(given)
        assert (options.nnodes, options.nproc_per_node, options.node_rank) == ("2", "2", 1)
        assert (options.master_addr, options.master_port) == ("$(LWS_LEADER_ADDRESS)", 29600)
        assert options.no_python
        assert options.training_script == "quire"
        component, settings = parse(options.training_script_args, variables(container), monkeypatch)
        assert (component, settings["tensor_parallel"]) == ("engine", 4)


def test_only_the_first_pod_of_a_group_serves() -> None:
    objects = render(TWO_PODS)
    first, other = templates(objects)
    service = by_name(objects, "Service")["engine"]["spec"]["selector"]
    assert service.items() <= first["metadata"]["labels"].items()
    assert not service.items() <= other["metadata"]["labels"].items()
    (serves,), (computes,) = (template["spec"]["containers"] for template in (first, other))
    assert {port["name"]: port["containerPort"] for port in serves["ports"]} == PORTS["engine"]
    assert {"startupProbe", "livenessProbe", "readinessProbe", "ports"} & serves.keys() - computes.keys() == {
        "startupProbe",
        "livenessProbe",
        "readinessProbe",
        "ports",
    }


def test_an_autoscaler_counts_groups() -> None:
    keda = {"enabled": True, "prometheusAddress": "http://prometheus:9090"}
    hpa = only(render_ci("two-pods"), "HorizontalPodAutoscaler")
    scaled = only(render(merged(TWO_PODS, {"engine": {"autoscaling": {"keda": keda}}})), "ScaledObject")
    for item in (hpa, scaled):
        target = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "blue-quire-engine"}
        assert item["spec"]["scaleTargetRef"] == target
    assert 'engine=~"blue-quire-engine-[0-9]+"' in json.dumps(scaled).replace("\\", "")


def test_pods_of_an_engine_may_connect_to_each_other_only() -> None:
    policies = {component_of(item): item["spec"] for item in of_kind(render_ci("two-pods"), "NetworkPolicy")}

    def peers(rules: list[Object], way: str) -> set[str]:
        """Return the components to which all ports are open."""
        found = [peer for rule in rules if "ports" not in rule for peer in rule[way]]
        return {one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for one in found}

    assert peers(policies["engine-rank"]["ingress"], "from") == {"engine", "engine-rank"}
    assert peers(policies["engine"]["ingress"], "from") == {"engine-rank"}
    assert peers(policies["engine"]["egress"][:-1], "to") == {"engine-rank"}
    assert "engine-rank" not in {component_of(item) for item in of_kind(render_ci("restricted"), "NetworkPolicy")}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            {"settings": {"tensor_parallel": 3}},
            "engine.settings.tensor_parallel is 3, but engine.ranks.pods is 2: each pod needs the same number of ranks",
        ),
        (
            {"settings": {"tensor_parallel": 1}},
            "engine.settings.tensor_parallel is 1, but engine.ranks.pods is 2: each pod needs the same number of ranks",
        ),
        (
            {"settings": {"grace_seconds": 30}},
            "engine.settings.grace_seconds is 30, but engine.ranks.pods is 2: at most 25, because torchrun kills",
        ),
        (
            {"podDisruptionBudget": {"enabled": True}},
            "engine.podDisruptionBudget is enabled, but engine.ranks.pods is 2: it would not count the pods",
        ),
        ({"ranks": {"pods": 0}}, "at '/engine/ranks/pods': minimum: got 0, want 1"),
        ({"ranks": {"port": 70000}}, "at '/engine/ranks/port': maximum: got 70,000, want 65,535"),
    ],
)
def test_ranks_that_could_not_run_are_refused(values: Object, complaint: str) -> None:
    assert complaint in refusal(merged(TWO_PODS, {"engine": values}))


def test_a_model_among_several_can_have_ranks_in_pods() -> None:
    models = [
        {"name": "large", "model": "org/large", **TWO_PODS["engine"]},
        {"name": "small", "model": "org/small"},
    ]
    objects = render({"models": models})
    assert set(by_name(objects, "LeaderWorkerSet")) == {"engine-large"}
    assert "engine-small" in deployments(objects)
