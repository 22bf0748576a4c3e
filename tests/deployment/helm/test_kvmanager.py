"""KV managers: where they run, their priority, resources, and what happens when their node is lost."""

from typing import Any

import pytest

from tests.deployment.helm.chart import (
    PORTS,
    VALUES,
    Object,
    by_name,
    component_of,
    containers,
    deployments,
    merged,
    of_kind,
    pods,
    render,
    render_ci,
    settings_of,
    variables,
)
from tests.deployment.helm.test_ranks import TWO_PODS, templates

MODELS = {"models": [{"name": "a", "model": "org/a"}, {"name": "b", "model": "org/b"}]}
OF_MODELS = merged(MODELS, {"kvmanager": {"placement": "model"}})
PORT = PORTS["kvmanager"]["grpc"]
BESIDE = {"kvmanager": {"placement": "engine"}}


def beside(pod: Object) -> Object:
    (container,) = [one for one in pod["spec"]["containers"] if one["name"] == "kvmanager"]
    return container


def tolerations(objects: list[Object], name: str = "kvmanager") -> dict[str, Any]:
    found = pods(objects)[name]["spec"]["tolerations"]
    return {one["key"]: one.get("tolerationSeconds") for one in found}


def test_each_model_has_a_kv_manager_to_which_its_engines_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render(OF_MODELS)
    assert sorted(deployments(objects)) == ["engine-a", "engine-b", "gateway", "kvmanager-a", "kvmanager-b"]
    for name in "ab":
        engine = settings_of(pods(objects)[f"engine-{name}"], monkeypatch)
        assert engine.kvmanager == f"blue-quire-kvmanager-{name}:{PORT}"
        selector = by_name(objects, "Service")[f"kvmanager-{name}"]["spec"]["selector"]
        assert selector["quire-model"] == name
        assert deployments(objects)[f"kvmanager-{name}"]["spec"]["replicas"] == 1


def test_a_kv_manager_of_each_model_is_the_shared_one_for_a_single_model() -> None:
    assert render({"kvmanager": {"placement": "model"}}) == render()


def test_a_kv_manager_beside_its_engine_is_reached_by_loopback_and_by_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render(merged(MODELS, BESIDE))
    assert sorted(deployments(objects)) == ["engine-a", "engine-b", "gateway"]
    for name in "ab":
        pod = pods(objects)[f"engine-{name}"]
        assert settings_of(pod, monkeypatch).kvmanager == f"127.0.0.1:{PORT}"
        assert variables(beside(pod))["QUIRE_KVMANAGER_LISTEN"] == f"0.0.0.0:{PORT}"
    ports = [port["name"] for one in pod["spec"]["containers"] for port in one["ports"]]
    assert len(ports) == len(set(ports)), "a Service finds the port by its name"
    service = by_name(objects, "Service")["kvmanager"]["spec"]
    assert {port["targetPort"] for port in service["ports"]} == {port["name"] for port in beside(pod)["ports"]}
    assert settings_of(pods(objects)["gateway"], monkeypatch).kvmanager == f"dns:blue-quire-kvmanager:{PORT}"
    assert {component_of(item) for item in of_kind(objects, "ServiceAccount")} == {"engine", "gateway"}


@pytest.mark.parametrize(("engine", "manager", "seconds"), [(30, 45, 60), (30, 31.5, 47), (20, 99, 114)])
def test_a_pod_with_both_ends_after_the_kv_manager(engine: float, manager: float, seconds: int) -> None:
    grace = {"engine": {"settings": {"grace_seconds": engine}}, "kvmanager": {"settings": {"grace_seconds": manager}}}
    assert pods(render(merged(BESIDE, grace)))["engine"]["spec"]["terminationGracePeriodSeconds"] == seconds


def test_a_kv_manager_beside_its_engine_has_its_own_certificate() -> None:
    pod = pods(render_ci("sidecars"))["engine"]
    secrets = {one["name"]: one["secret"]["secretName"] for one in pod["spec"]["volumes"] if "secret" in one}
    mounts = {
        one["name"]: mount["name"]
        for one in pod["spec"]["containers"]
        for mount in one["volumeMounts"]
        if mount["mountPath"] == "/etc/quire-tls"
    }
    assert mounts == {"engine": "tls", "kvmanager": "kvmanager-tls"}
    assert secrets.keys() == {"tls", "kvmanager-tls"}


def test_only_the_first_pod_of_ranks_has_a_kv_manager() -> None:
    first, other = templates(render(merged(TWO_PODS, BESIDE)))
    assert [one["name"] for one in first["spec"]["containers"]] == ["engine", "kvmanager"]
    assert [one["name"] for one in other["spec"]["containers"]] == ["engine"]
    assert "kvmanager-tmp" not in {one["name"] for one in other["spec"]["volumes"]}


def test_only_gateways_reach_the_kv_managers_beside_engines() -> None:
    policies = by_name(render_ci("sidecars"), "NetworkPolicy")
    assert policies.keys() == {"engine", "gateway"}
    (calls,) = [one for one in policies["engine"]["spec"]["ingress"] if {"port": PORT} in one["ports"]]
    assert {"port": PORTS["engine"]["grpc"]} in calls["ports"]
    assert [one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for one in calls["from"]] == ["gateway"]
    (to,) = [one for one in policies["gateway"]["spec"]["egress"] if {"port": PORT} in one["ports"]]
    assert [one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for one in to["to"]] == ["engine"]
    (metrics,) = [
        one for one in policies["engine"]["spec"]["ingress"] if {"port": PORTS["kvmanager"]["metrics"]} in one["ports"]
    ]
    assert "namespaceSelector" in metrics["from"][0]


# A lost node, and nodes without room


def test_a_kv_manager_leaves_a_lost_node_before_requests_fail() -> None:
    assert tolerations(render()) == dict.fromkeys(
        ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"), 10
    )
    assert VALUES["engine"]["settings"]["seconds_without_kvmanager"] > 10
    more = render({"kvmanager": {"tolerations": [{"key": "pool", "operator": "Exists"}], "lostNodeSeconds": 5}})
    assert tolerations(more) == {"node.kubernetes.io/not-ready": 5, "node.kubernetes.io/unreachable": 5, "pool": None}
    assert "tolerations" not in pods(render())["engine"]["spec"]


def test_a_toleration_of_the_values_replaces_that_of_the_chart_for_the_same_taint() -> None:
    """Kubernetes applies the first one that matches, so one after the chart's would have no effect."""
    own = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 20}
    spec = pods(render({"kvmanager": {"tolerations": [own]}}))["kvmanager"]["spec"]
    keys = [one["key"] for one in spec["tolerations"]]
    assert sorted(keys) == ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"]
    assert own in spec["tolerations"]


def test_a_kv_manager_has_room_in_its_node_by_default() -> None:
    resources = containers(render())["kvmanager"]["resources"]
    assert resources == {"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    assert beside(pods(render(BESIDE))["engine"])["resources"] == resources
