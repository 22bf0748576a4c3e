"""Gateways on several nodes, and the ways to them: a headless Service, and routes of the Gateway API."""

import pytest

from tests.deployment.helm.chart import (
    PORTS,
    Object,
    all_pods,
    by_name,
    merged,
    of_kind,
    only,
    pods,
    render,
    render_ci,
)

OPEN = {"gateway": {"insecure": True}}


def affinity(values: Object) -> Object:
    found: Object = pods(render({"gateway": values}))["gateway"]["spec"].get("affinity", {})
    return found


def test_gateways_prefer_nodes_without_one_of_their_release() -> None:
    (preferred,) = affinity({})["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    selector = term["labelSelector"]["matchLabels"]
    everywhere = [*all_pods(render()).values(), *all_pods(render(release="green")).values()]
    selected = [pod for pod in everywhere if selector.items() <= pod["metadata"]["labels"].items()]
    assert selected == [pods(render())["gateway"]]
    assert "affinity" not in pods(render())["engine"]["spec"]


def test_other_affinities_are_possible() -> None:
    required = affinity({"antiAffinity": "required", "rollingUpdate": {"maxUnavailable": 1}})["podAntiAffinity"]
    assert list(required) == ["requiredDuringSchedulingIgnoredDuringExecution"]
    assert affinity({"antiAffinity": "none"}) == {}
    assert affinity({"affinity": {"nodeAffinity": {}}}).keys() == {"nodeAffinity", "podAntiAffinity"}
    assert affinity({"affinity": {"podAntiAffinity": {"a": "b"}}}) == {"podAntiAffinity": {"a": "b"}}


def test_a_spread_without_a_selector_counts_the_pods_of_the_same_workload() -> None:
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    own = {**spread, "labelSelector": {"matchLabels": {"a": "b"}}}
    models = [{"name": name, "model": f"org/{name}"} for name in "ab"]
    values = {"models": models, "engine": {"topologySpreadConstraints": [spread, own]}}
    rendered = pods(render(values))
    for name in ("engine-a", "engine-b"):
        first, second = rendered[name]["spec"]["topologySpreadConstraints"]
        selector = first.pop("labelSelector")["matchLabels"]
        assert (first, second) == (spread, own)
        selected = [one for one, pod in rendered.items() if selector.items() <= pod["metadata"]["labels"].items()]
        assert selected == [name]


def test_a_headless_service_resolves_to_all_gateways_and_has_no_metrics_twice() -> None:
    assert "gateway-headless" not in by_name(render(), "Service")
    service = by_name(render({"gateway": {"headlessService": {"enabled": True}}}), "Service")["gateway-headless"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= pods(render())["gateway"]["metadata"]["labels"].items()
    assert [port["name"] for port in service["spec"]["ports"]] == ["grpc", "http"]
    assert "quire-job" not in service["metadata"]["labels"]


@pytest.mark.parametrize(("kind", "protocol"), [("HTTPRoute", "http"), ("GRPCRoute", "grpc")])
def test_a_route_of_the_gateway_api_leads_to_the_gateways_port(kind: str, protocol: str) -> None:
    route = only(render_ci("sidecars"), kind)["spec"]
    assert route["parentRefs"] == [{"name": "public", "namespace": "gateways", "sectionName": "https"}]
    (rule,) = route["rules"]
    (backend,) = rule["backendRefs"]
    service = by_name(render_ci("sidecars"), "Service")["gateway"]
    assert backend == {"name": service["metadata"]["name"], "port": PORTS["gateway"][protocol]}
    assert backend["port"] in {port["port"] for port in service["spec"]["ports"]}


def test_a_route_has_no_timeout_for_streams_unless_it_is_set() -> None:
    (rule,) = only(render_ci("sidecars"), "HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    http = {"enabled": True, "parentRefs": [{"name": "public"}], "timeout": "1h"}
    objects = render(merged(OPEN, {"gateway": {"routes": {"http": http}}}))
    (rule,) = only(objects, "HTTPRoute")["spec"]["rules"]
    assert rule["timeouts"] == {"request": "1h", "backendRequest": "1h"}
    assert of_kind(objects, "GRPCRoute") == []
