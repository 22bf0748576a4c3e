"""Engines behind routers of others: a gateway in each pod, an InferencePool, KV events, and labels."""

import json
import re
from typing import Any

import pytest

from services.runtime.ports import ENGINE, GATEWAY, KV_EVENTS, KVMANAGER
from tests.deployment.helm.chart import (
    MUTUAL_TLS,
    PORTS,
    Object,
    all_containers,
    by_name,
    engine_pod,
    merged,
    nested,
    of_kind,
    only,
    pods,
    refusal,
    render,
    render_ci,
    service_container,
    settings_in,
    volumes,
)

KEYS = nested("gateway.apiKeys.existingSecret", "keys")
POOL = merged(nested("engine.inferencePool.enabled", True), KEYS)
EVENTS = nested("engine.kvEvents", {"enabled": True, "insecure": True})
CURVE = nested("engine.kvEvents", {"enabled": True, "curve": {"existingSecret": "event-keys"}})
AIBRIX = nested("engine.aibrix.enabled", True)
PICKER = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "picker"}}}]
BEHIND_POLICY = {"networkPolicy": {"enabled": True, "routers": PICKER}}
ROUTER_LABELS = re.compile("aibrix|llm-d|inference.networking")


def of_routers(pod: Object) -> dict[str, str]:
    metadata = pod["metadata"]
    both = {**metadata["labels"], **metadata.get("annotations", {})}
    return {name: value for name, value in both.items() if ROUTER_LABELS.search(name)}


# A gateway in each pod


@pytest.mark.parametrize(
    "values", [nested("engine.podGateway.enabled", True), POOL, AIBRIX], ids=["alone", "pool", "aibrix"]
)
def test_the_gateway_of_a_pod_calls_the_engine_beside_it_alone(values: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = engine_pod(values)
    gateway = settings_in(pod, "gateway", monkeypatch)
    assert gateway.engines == f"127.0.0.1:{ENGINE.grpc}"
    assert gateway.kvmanager == ""
    assert gateway.http_listen == f"0.0.0.0:{GATEWAY.http}"
    assert bool(gateway.api_keys) != gateway.insecure


def test_a_pod_has_no_gateway_by_default_and_all_containers_have_ports_of_their_own() -> None:
    assert [one["name"] for one in all_containers(engine_pod({}))] == ["engine"]
    beside = merged(POOL, EVENTS, nested("kvmanager.placement", "engine"))
    ports = [port for one in all_containers(engine_pod(beside)) for port in one["ports"]]
    assert len({port["name"] for port in ports}) == len({port["containerPort"] for port in ports}) == len(ports)
    assert all(len(port["name"]) <= 15 for port in ports), "as Kubernetes allows"


def test_all_services_of_a_pod_continue_until_routers_have_removed_it() -> None:
    values = merged(POOL, {"kvmanager": {"placement": "engine"}, "gateway": {"preStopSeconds": 7}})
    spec = engine_pod(values)["spec"]
    assert [one["lifecycle"]["preStop"] for one in spec["containers"]] == [{"sleep": {"seconds": 7}}] * 3
    # The longest drain is the KV manager's.
    assert spec["terminationGracePeriodSeconds"] == 7 + 45 + 15


def test_the_gateway_of_a_pod_has_the_keys_and_the_certificate_of_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = engine_pod(merged(POOL, MUTUAL_TLS))
    volumes(pod)  # all are mounted
    named = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounted = {
        mount["mountPath"]: named[mount["name"]].get("secret", {}).get("secretName")
        for mount in service_container(pod, "gateway")["volumeMounts"]
    }
    assert mounted == {"/tmp": None, "/etc/quire-keys": "keys", "/etc/quire-tls": "g"}
    gateway, engine = (settings_in(pod, service, monkeypatch) for service in ("gateway", "engine"))
    assert gateway.api_keys == "/etc/quire-keys/api_keys.toml"
    assert gateway.link_certificate == "/etc/quire-tls/tls.crt"
    assert engine.tls_client_ca == "/etc/quire-tls/ca.crt", "the engine knows it"


def test_prometheus_scrapes_the_gateways_of_pods_as_gateways() -> None:
    service = by_name(render(POOL), "Service")["pod-gateway"]
    assert service["metadata"]["labels"]["quire-job"] == "quire-gateway"
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "engine"
    ports = {port["name"]: port["containerPort"] for port in service_container(engine_pod(POOL), "gateway")["ports"]}
    assert [ports[port["targetPort"]] for port in service["spec"]["ports"]] == [GATEWAY.metrics]


# The InferencePool


def test_a_pool_selects_the_pods_with_a_gateway_and_its_port() -> None:
    rendered = render(POOL)
    pool = only(rendered, "InferencePool")
    wanted = pool["spec"]["selector"]["matchLabels"].items()
    selected = [name for name, pod in pods(rendered).items() if wanted <= pod["metadata"]["labels"].items()]
    assert selected == ["engine"]
    assert pool["spec"]["targetPorts"] == [{"number": GATEWAY.http}]
    assert pool["metadata"]["name"] == "blue-quire-engine"
    assert pool["spec"]["endpointPickerRef"] == {
        "name": "blue-quire-engine-epp",
        "port": {"number": 9002},
        "failureMode": "FailClose",
    }


def test_each_model_has_a_pool_of_its_own_and_other_ranks_are_in_none() -> None:
    rendered = render_ci("routers")
    pools = by_name(rendered, "InferencePool")
    assert pools.keys() == {"engine-large", "engine-spread"}
    (set_of_ranks,) = of_kind(rendered, "LeaderWorkerSet")
    template = set_of_ranks["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[f"{which}Template"] for which in ("leader", "worker"))
    all_labels = {name: pod["metadata"]["labels"] for name, pod in pods(rendered).items()}
    all_labels |= {"leader": leader["metadata"]["labels"], "worker": worker["metadata"]["labels"]}
    found = {
        name: [
            pod
            for pod, labels in all_labels.items()
            if pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ]
        for name, pool in pools.items()
    }
    assert found == {"engine-large": ["engine-large"], "engine-spread": ["leader"]}
    assert "gateway" in {one["name"] for one in leader["spec"]["containers"]}
    assert [one["name"] for one in worker["spec"]["containers"]] == ["engine"]
    assert pools["engine-spread"]["spec"]["endpointPickerRef"]["name"] == "picker"


@pytest.mark.parametrize("values", [POOL, AIBRIX], ids=["pool", "aibrix"])
def test_engines_behind_a_picker_show_metrics_under_vllms_names(
    values: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings_in(engine_pod(values), "engine", monkeypatch).metrics_compat == "vllm"
    chosen = merged(values, nested("engine.settings.metrics_compat", "vllm"))
    assert settings_in(engine_pod(chosen), "engine", monkeypatch).metrics_compat == "vllm"


def test_rules_for_vllms_names_are_left_out_where_engines_show_them() -> None:
    rules = {"metrics": {"prometheusRule": {"enabled": True}}}
    groups = [
        {group["name"] for group in only(render(merged(rules, values)), "PrometheusRule")["spec"]["groups"]}
        for values in ({}, POOL)
    ]
    assert groups[0] - groups[1] == {"vllm"}


def test_pods_have_the_labels_by_which_routers_recognize_them_and_no_others() -> None:
    assert of_routers(engine_pod(merged(EVENTS, nested("engine.podGateway.enabled", True)))) == {}
    assert of_routers(engine_pod(POOL)) == {
        "llm-d.ai/engine-type": "vllm",
        "inference.networking.k8s.io/engine-type": "vllm",
    }
    aibrix = {
        "model.aibrix.ai/name": "demo",
        "model.aibrix.ai/engine": "vllm",
        "model.aibrix.ai/port": str(GATEWAY.http),
        "model.aibrix.ai/metric-port": str(ENGINE.metrics),
    }
    assert of_routers(engine_pod(AIBRIX)) == aibrix
    assert of_routers(engine_pod(merged(AIBRIX, EVENTS))) == aibrix | {"model.aibrix.ai/kv-events-enabled": "true"}


def test_a_models_name_that_is_no_label_is_an_annotation() -> None:
    named = nested("engine.settings.model_name", "org/chat")
    metadata = engine_pod(merged(AIBRIX, named, nested("engine.podAnnotations", {"a": "b"})))["metadata"]
    assert metadata["annotations"] == {"a": "b", "model.aibrix.ai/name": "org/chat"}
    assert "model.aibrix.ai/name" not in metadata["labels"]


def test_labels_of_routers_are_in_no_selector() -> None:
    for item in render(merged(POOL, AIBRIX, EVENTS, BEHIND_POLICY)):
        if item["kind"] != "Deployment":
            assert not ROUTER_LABELS.search(json.dumps(item["spec"])) if "spec" in item else True
        else:
            assert not ROUTER_LABELS.search(json.dumps(item["spec"]["selector"]))


# KV events


def test_events_are_not_published_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = settings_in(engine_pod({}), "engine", monkeypatch)
    assert (engine.kv_events_listen, engine.kv_events_replay_listen, engine.kv_events_insecure) == ("", "", False)


def test_events_are_published_in_plain_text_only_where_the_values_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = settings_in(engine_pod(EVENTS), "engine", monkeypatch)
    assert engine.kv_events_listen == f"0.0.0.0:{KV_EVENTS.events}"
    assert engine.kv_events_replay_listen == f"0.0.0.0:{KV_EVENTS.replay}"
    assert (engine.kv_events_insecure, engine.kv_events_curve_key) == (True, "")
    encrypted = settings_in(engine_pod(CURVE), "engine", monkeypatch)
    assert (encrypted.kv_events_insecure, encrypted.kv_events_listen) == (False, engine.kv_events_listen)


def test_the_keys_of_events_come_from_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = engine_pod(CURVE)
    assert volumes(pod)["/etc/quire-events"]["secret"] == {"secretName": "event-keys", "defaultMode": 0o440}
    engine = settings_in(pod, "engine", monkeypatch)
    files = engine.kv_events_curve_key, engine.kv_events_curve_clients
    assert files == ("/etc/quire-events/curve.key", "/etc/quire-events/curve.clients")
    assert "/etc/quire-events" not in volumes(engine_pod(EVENTS))


def test_the_topic_names_the_pod_and_the_model_as_llm_d_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    named = nested("engine.settings.model_name", "org/chat")
    pod = engine_pod(merged(EVENTS, named))
    assert settings_in(pod, "engine", monkeypatch).kv_events_topic == "kv@pod-1@org/chat"
    names = [variable["name"] for variable in service_container(pod, "engine")["env"]]
    assert names.index("QUIRE_ENGINE_ENGINE_ID") < names.index("QUIRE_ENGINE_KV_EVENTS_TOPIC"), "else it is no name"
    own = merged(EVENTS, nested("engine.settings.kv_events_topic", "mine"))
    assert settings_in(engine_pod(own), "engine", monkeypatch).kv_events_topic == "mine"


def test_aibrix_gets_events_as_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_in(engine_pod(EVENTS), "engine", monkeypatch).kv_events_form == "map"
    assert settings_in(engine_pod(merged(EVENTS, AIBRIX)), "engine", monkeypatch).kv_events_form == "array"


def test_ports_of_events_are_those_that_routers_dial() -> None:
    ports = {port["name"]: port["containerPort"] for port in service_container(engine_pod(EVENTS), "engine")["ports"]}
    assert ports["kv-events"] == 5557
    assert ports["kv-replay"] == 5558
    assert ports.keys() == {*PORTS["engine"], "kv-events", "kv-replay"}


# Network policies


def rules_for(values: Object, port: int) -> list[Any]:
    """Return the peers of each rule that opens a port of the engines; None is anyone."""
    policies = by_name(render(merged(BEHIND_POLICY, values)), "NetworkPolicy")
    return [rule.get("from") for rule in policies["engine"]["spec"]["ingress"] if {"port": port} in rule["ports"]]


@pytest.mark.parametrize("port", [KV_EVENTS.events, KV_EVENTS.replay])
def test_only_named_pods_reach_the_events(port: int) -> None:
    assert rules_for(EVENTS, port) == [PICKER]
    assert rules_for(POOL, port) == []


def test_pickers_reach_the_metrics_of_engines_and_not_their_grpc() -> None:
    assert PICKER in rules_for(POOL, ENGINE.metrics)
    assert PICKER not in rules_for(POOL, ENGINE.grpc)


def test_clients_reach_the_gateways_of_pods_as_they_reach_other_gateways() -> None:
    clients = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}]
    assert rules_for({}, GATEWAY.http) == []
    assert rules_for(POOL, GATEWAY.http) == [None, PICKER]
    assert rules_for(merged(POOL, {"networkPolicy": {"clients": clients}}), GATEWAY.http) == [clients, PICKER]


def test_a_kv_manager_beside_its_engine_stays_closed_to_routers() -> None:
    beside = merged(POOL, EVENTS, nested("kvmanager.placement", "engine"))
    assert PICKER not in rules_for(beside, KVMANAGER.grpc)


# Refusals


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            nested("engine.kvEvents.enabled", True),
            "engine.kvEvents is enabled, and whoever reaches a pod would read the token ids of prompts: set "
            "engine.kvEvents.curve.existingSecret, or engine.kvEvents.insecure",
        ),
        (
            {"models": [{"name": "a", "model": "org/a", "kvEvents": {"enabled": True}}]},
            "models[a].kvEvents is enabled, and whoever reaches a pod would read the token ids of prompts",
        ),
        (
            merged(CURVE, nested("engine.kvEvents.insecure", True)),
            "engine.kvEvents has both curve.existingSecret and insecure: events are encrypted, or not",
        ),
        (
            nested("engine.kvEvents.curve.existingSecret", "keys"),
            "engine.kvEvents.curve.existingSecret is set, but engine.kvEvents is not enabled: nothing would be",
        ),
        (
            nested("engine.inferencePool.enabled", True),
            "engine.inferencePool is enabled, which opens the gateways in the pods beyond the cluster without API keys",
        ),
        (
            merged(POOL, nested("engine.settings.metrics_compat", "none")),
            "engine.settings.metrics_compat is none, but engine.inferencePool is enabled: routers read the metrics",
        ),
        (
            merged(AIBRIX, EVENTS, nested("engine.settings.kv_events_form", "map")),
            "engine.settings.kv_events_form is map, but engine.aibrix is enabled, which reads arrays",
        ),
        (
            merged(AIBRIX, CURVE),
            "engine.kvEvents.curve.existingSecret is set, but engine.aibrix is enabled, which speaks no CURVE: set "
            "engine.kvEvents.insecure, and let networkPolicy decide who reaches the events",
        ),
        (
            nested("engine.podGateway.resources", {"limits": {"cpu": 1}}),
            "engine.podGateway.resources are set, but no pod has a gateway: set engine.podGateway.enabled",
        ),
        (
            merged(EVENTS, {"networkPolicy": {"enabled": True}}),
            "networkPolicy is enabled, but networkPolicy.routers is empty: no router would reach the metrics,",
        ),
        (
            merged(POOL, nested("engine.terminationGracePeriodSeconds", 35)),
            "engine.terminationGracePeriodSeconds is 35, but the pod drains for 35 s (settings.grace_seconds and "
            "preStopSeconds): Kubernetes would kill it before its end",
        ),
    ],
)
def test_values_with_which_routers_would_see_too_much_or_nothing_are_refused(values: Object, complaint: str) -> None:
    message = refusal(values)
    assert f"- {complaint}" in message
    assert message.count("\n- ") == 1, "only one fault is reported"


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("engine.settings.kv_events_listen", "0.0.0.0:1", "additional properties 'kv_events_listen' not allowed"),
        ("engine.settings.kv_events_insecure", True, "additional properties 'kv_events_insecure' not allowed"),
        ("engine.settings.kv_events_history", 0, "at '/engine/settings/kv_events_history': minimum: got 0, want 64"),
        ("engine.settings.kv_events_form", "list", "at '/engine/settings/kv_events_form': value must be one of 'map'"),
        ("engine.inferencePool.endpointPicker.port", 0, "endpointPicker/port': minimum: got 0, want 1"),
        ("engine.inferencePool.endpointPicker.failureMode", "Open", "failureMode': value must be one of 'FailOpen'"),
        (
            "engine.kvEvents.curve.secret",
            "a",
            "at '/engine/kvEvents/curve': additional properties 'secret' not allowed",
        ),
    ],
)
def test_a_wrong_value_for_routers_is_refused_naming_its_path(path: str, value: Any, complaint: str) -> None:
    assert complaint in refusal(nested(path, value))
