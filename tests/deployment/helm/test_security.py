"""The restricted Pod Security Standard, service accounts, network policies and API keys."""

from typing import Any

import pytest

from services.runtime.ports import KVMANAGER
from tests.deployment.helm.chart import (
    CI_VALUES,
    PORTS,
    ROOT,
    TYPES,
    Object,
    all_containers,
    all_pods,
    by_name,
    ci,
    component_of,
    deployments,
    merged,
    nested,
    of_kind,
    pods,
    render,
    render_ci,
    settings_of,
    volumes,
)

# Volumes that "restricted" allows.
VOLUME_TYPES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


@pytest.mark.parametrize("name", CI_VALUES)
def test_every_pod_passes_the_restricted_pod_security_standard(name: str) -> None:
    for pod in all_pods(render_ci(name)).values():
        spec = pod["spec"]
        assert not spec.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"].get("runAsUser") != 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in spec["volumes"]:
            assert volume.keys() - {"name"} <= VOLUME_TYPES
        for container in all_containers(pod):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert not security.get("privileged")
            assert not any("hostPort" in port for port in container.get("ports", []))


@pytest.mark.parametrize("name", CI_VALUES)
def test_containers_write_only_to_mounted_volumes(name: str) -> None:
    for pod in all_pods(render_ci(name)).values():
        for container in all_containers(pod):
            if container["image"].startswith("quire:"):
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_pods_user_is_the_images_unless_the_cluster_assigns_users() -> None:
    assert "USER 10001:10001" in (ROOT / "Dockerfile").read_text().splitlines()
    users = {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}
    for pod in all_pods(render()).values():
        assert users.items() <= pod["spec"]["securityContext"].items()
        assert pod["spec"]["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    for pod in all_pods(render_ci("restricted")).values():
        assert not users.keys() & pod["spec"]["securityContext"].keys()


def test_only_engines_with_the_setting_have_a_writable_root() -> None:
    rendered = pods(render({"engine": {"writableRootFilesystem": True}}))
    read_only = {
        name: [one["securityContext"]["readOnlyRootFilesystem"] for one in all_containers(pod)]
        for name, pod in rendered.items()
    }
    assert read_only == {"kvmanager": [True], "engine": [False], "gateway": [True]}


# Service accounts


def test_each_component_has_its_own_account_without_a_token() -> None:
    rendered = render()
    accounts = by_name(rendered, "ServiceAccount")
    assert {account["automountServiceAccountToken"] for account in accounts.values()} == {False}
    used = {name: pod["spec"]["serviceAccountName"] for name, pod in pods(rendered).items()}
    assert used == {name: account["metadata"]["name"] for name, account in accounts.items()}
    assert {pod["spec"]["automountServiceAccountToken"] for pod in all_pods(rendered).values()} == {False}


@pytest.mark.parametrize(
    ("account", "used", "created"),
    [
        ({"create": False}, "default", []),
        ({"create": False, "name": "there"}, "there", []),
        ({"name": "mine"}, "mine", ["mine"]),
    ],
)
def test_an_existing_account_can_be_used(account: Object, used: str, created: list[str]) -> None:
    rendered = render({"engine": {"serviceAccount": account}})
    assert pods(rendered)["engine"]["spec"]["serviceAccountName"] == used
    accounts = [item for item in of_kind(rendered, "ServiceAccount") if component_of(item) == "engine"]
    assert [item["metadata"]["name"] for item in accounts] == created


# Network policies: a connection needs a policy of the pod that allows it.


def labels_of(objects: list[Object]) -> dict[str, Object]:
    return {name: pod["metadata"]["labels"] for name, pod in all_pods(objects).items()}


def is_peer(rules: list[Object] | None, labels: Object | None) -> bool:
    """Return True if rules select a pod of the release by its labels, or a peer outside (None); no rules select all."""
    if not rules:
        return True
    own = [rule["podSelector"]["matchLabels"] for rule in rules if rule.keys() == {"podSelector"}]
    return labels is not None and any(wanted.items() <= labels.items() for wanted in own)


def allowed(policies: list[Object], direction: str, labels: Object, other: Object | None, port: int) -> bool:
    """Return True if policies allow the pod a connection from (Ingress) or to (Egress) another one at a TCP port."""
    specs = [one["spec"] for one in policies if one["spec"]["podSelector"]["matchLabels"].items() <= labels.items()]
    specs = [spec for spec in specs if direction in spec["policyTypes"]]
    peers = {"Ingress": "from", "Egress": "to"}[direction]
    return not specs or any(
        any(one["port"] == port and one.get("protocol", "TCP") == "TCP" for one in rule["ports"])
        and is_peer(rule.get(peers), other)
        for spec in specs
        for rule in spec[direction.lower()]
    )


def flows(objects: list[Object]) -> set[tuple[str, str, str]]:
    """Return all allowed connections of the release: caller, callee and port."""
    policies, labels = of_kind(objects, "NetworkPolicy"), labels_of(objects)
    return {
        (caller, called, name)
        for caller in labels
        for called in deployments(objects)
        for name, port in PORTS[component_of(deployments(objects)[called])].items()
        if caller != called
        and allowed(policies, "Egress", labels[caller], labels[called], port)
        and allowed(policies, "Ingress", labels[called], labels[caller], port)
    }


NEEDED = {
    ("gateway", "engine", "grpc"),
    ("gateway", "kvmanager", "grpc"),
    ("engine", "kvmanager", "grpc"),
    ("test", "gateway", "grpc"),
}


def test_network_policies_allow_only_the_required_connections() -> None:
    everything = flows(render())
    assert everything > NEEDED
    assert len(everything) > 15, "without policies everything is allowed"
    assert flows(render_ci("restricted")) == NEEDED | {("test", "gateway", "http")}


def test_gateways_reach_the_engines_of_every_model() -> None:
    found = flows(render({**ci("models"), "networkPolicy": {"enabled": True}}))
    for engine in ("engine-large", "engine-small"):
        assert {("gateway", engine, "grpc"), (engine, "kvmanager", "grpc")} <= found


@pytest.mark.parametrize(("name", "open_ports"), [("tls", {"grpc", "http"}), ("restricted", set())])
def test_other_pods_reach_only_the_gateway_unless_clients_are_named(name: str, open_ports: set[str]) -> None:
    rendered = render_ci(name)
    policies, labels = of_kind(rendered, "NetworkPolicy"), labels_of(rendered)
    found = {
        (component, port)
        for component in TYPES
        for port, number in PORTS[component].items()
        if allowed(policies, "Ingress", labels[component], None, number)
    }
    assert found == {("gateway", port) for port in open_ports}


def test_network_policies_allow_metrics_and_clients_from_their_namespaces_only() -> None:
    def peers(name: str, port: int) -> list[Any]:
        rules = by_name(render_ci("restricted"), "NetworkPolicy")[name]["spec"]["ingress"]
        return [rule["from"] for rule in rules if {"port": port} in rule["ports"]]

    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    for component, ports in PORTS.items():
        assert peers(component, ports["metrics"]) == [[monitoring]]
    (clients,) = peers("gateway", PORTS["gateway"]["grpc"])
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}} in clients


def test_the_block_map_is_unreachable_unless_it_is_opened_to_named_peers() -> None:
    def rules(values: Object) -> list[Object]:
        policies = by_name(render(merged({"networkPolicy": {"enabled": True}}, values)), "NetworkPolicy")
        return [rule for rule in policies["kvmanager"]["spec"]["ingress"] if {"port": KVMANAGER.http} in rule["ports"]]

    opened, peers = {"kvmanager": {"map": {"open": True}}}, [{"podSelector": {"matchLabels": {"app": "browser"}}}]
    assert rules(opened) == rules({"networkPolicy": {"map": peers}}) == []
    assert rules({**opened, "networkPolicy": {"map": peers}}) == [{"ports": [{"port": KVMANAGER.http}], "from": peers}]


def test_only_engines_reach_the_internet_and_all_reach_dns() -> None:
    policies = of_kind(render({"networkPolicy": {"enabled": True}}), "NetworkPolicy")
    found = {}
    for policy in policies:
        to_anyone = [rule["ports"] for rule in policy["spec"]["egress"] if "to" not in rule]
        found[component_of(policy)] = [one["port"] for ports in to_anyone for one in ports]
    assert found == {"kvmanager": [53, 53], "engine": [53, 53, 443], "gateway": [53, 53]}


# API keys


def test_the_gateway_reads_api_keys_from_a_secret_or_is_insecure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pod = pods(render(nested("gateway.apiKeys.existingSecret", "keys")))["gateway"]
    assert volumes(pod)["/etc/quire-keys"]["secret"] == {"secretName": "keys", "defaultMode": 0o440}
    settings = settings_of(pod, monkeypatch)
    assert (settings.api_keys, settings.insecure) == ("/etc/quire-keys/api_keys.toml", False)
    pod = pods(render())["gateway"]
    settings = settings_of(pod, monkeypatch)
    assert (settings.api_keys, settings.insecure) == ("", True)
    assert "/etc/quire-keys" not in volumes(pod)


@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_a_public_service_exposes_no_metrics(kind: str) -> None:
    services = by_name(render({"gateway": {"service": {"type": kind}, "insecure": True}}), "Service")
    ports = {name: [port["name"] for port in item["spec"]["ports"]] for name, item in services.items()}
    assert ports["gateway"] == ["grpc", "http"]
    assert ports["gateway-metrics"] == ["metrics"]
    assert [services[name]["spec"]["type"] for name in ("gateway", "gateway-metrics")] == [kind, "ClusterIP"]
