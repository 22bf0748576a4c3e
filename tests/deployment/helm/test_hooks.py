"""Additions to the chart, `helm test`, pinned prompts, and notes after an install."""

import json
from pathlib import Path

import pytest

from services.gateway.pinned_prompts import read
from tests.deployment.helm.chart import (
    CHART,
    PORTS,
    TYPES,
    Object,
    all_containers,
    by_name,
    ci,
    containers,
    helm,
    main_container,
    merged,
    nested,
    of_kind,
    only,
    parse,
    pods,
    render,
    render_ci,
    settings_of,
    variables,
    volumes,
)


def test_extra_values_are_rendered_into_the_pods() -> None:
    extra = ci("extra")
    rendered = pods(render_ci("extra"))
    engine = rendered["engine"]
    assert [one["name"] for one in all_containers(engine)] == ["model", "engine"]
    assert main_container(engine)["args"] == ["engine", "--block-size=32"]
    assert extra["engine"]["extraEnv"][0] in main_container(engine)["env"]
    assert main_container(engine)["envFrom"] == extra["engine"]["extraEnvFrom"]
    assert volumes(engine)["/scratch"] == {"name": "scratch", "emptyDir": {}}
    gateway = rendered["gateway"]
    assert [one["name"] for one in all_containers(gateway)] == ["gateway", "tail"]
    assert extra["gateway"]["podAnnotations"].items() <= gateway["metadata"]["annotations"].items()
    assert gateway["spec"]["tolerations"] == extra["gateway"]["tolerations"]
    kvmanager = rendered["kvmanager"]
    assert kvmanager["metadata"]["labels"]["team"] == "inference"
    assert kvmanager["spec"]["priorityClassName"] == "serving"
    assert kvmanager["spec"]["nodeSelector"] == {"pool": "cpu"}
    for pod in rendered.values():
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]


def test_templates_in_added_objects_are_filled_in() -> None:
    config_maps = {item["metadata"]["name"]: item for item in of_kind(render_ci("extra"), "ConfigMap")}
    assert config_maps["blue-extra"]["data"] == {"gateway": "blue-quire-gateway"}


@pytest.mark.parametrize("component", TYPES)
def test_selector_labels_cannot_be_overridden(component: str) -> None:
    labels = {"app.kubernetes.io/component": "other", "team": "a"}
    pod = pods(render({component: {"podLabels": labels}}))[component]
    assert pod["metadata"]["labels"] == {**pods(render())[component]["metadata"]["labels"], "team": "a"}


def test_an_ingress_routes_to_the_gateways_http_port() -> None:
    ingress = only(render_ci("extra"), "Ingress")["spec"]
    (rule,) = ingress["rules"]
    assert rule["host"] == "llm.example.org"
    (path,) = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/", "Prefix")
    backend = path["backend"]["service"]
    service = by_name(render_ci("extra"), "Service")["gateway"]
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
    assert ingress["ingressClassName"] == "nginx"


# `helm test`


def test_helm_test_checks_health_and_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = only(render(), "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["restartPolicy"] == "Never"
    parsed = [parse(container["args"], variables(container), monkeypatch) for container in pod["spec"]["containers"]]
    assert [name for name, _ in parsed] == ["health", "generate"]
    assert {options.get("at") or options["address"] for _, options in parsed} == {
        f"blue-quire-gateway:{PORTS['gateway']['grpc']}"
    }


@pytest.mark.parametrize(("key", "commands"), [("", ["health"]), ("test-key", ["health", "generate-0"])])
def test_helm_test_uses_an_api_key_if_keys_are_required(key: str, commands: list[str]) -> None:
    values = merged(nested("gateway.apiKeys.existingSecret", "keys"), nested("test.apiKey.existingSecret", key))
    found = only(render(values), "Pod")["spec"]["containers"]
    assert [one["name"] for one in found] == commands
    if key:
        (variable,) = [one for one in found[1]["env"] if one["name"] == "QUIRE_API_KEY"]
        assert variable["valueFrom"]["secretKeyRef"] == {"name": key, "key": "api-key"}


# Pinned prompts


def test_the_gateway_reads_pinned_prompts_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts = [
        {"name": "a", "text": 'it\'s: "brief"\n# {{ x }}'},
        {"name": "b", "token_ids": [1000000, 2], "salt": "s"},
    ]
    objects = render({"gateway": {"pinnedPrompts": prompts}})
    ((name, text),) = only(objects, "ConfigMap")["data"].items()
    assert [json.loads(line) for line in text.splitlines()] == prompts
    (tmp_path / name).write_text(text)
    assert [prompt.name for prompt in read(str(tmp_path / name))] == ["a", "b"]
    assert settings_of(pods(objects)["gateway"], monkeypatch).pinned_prompts == f"/etc/quire/{name}"
    mounted = volumes(pods(objects)["gateway"])["/etc/quire"]
    assert mounted["configMap"] == {"name": only(objects, "ConfigMap")["metadata"]["name"]}


def test_changed_prompts_restart_pods_and_changed_keys_do_not() -> None:
    pinned = [pods(render({"gateway": {"pinnedPrompts": [{"name": name, "text": "x"}]}}))["gateway"] for name in "ab"]
    assert pinned[0]["metadata"]["annotations"] != pinned[1]["metadata"]["annotations"]
    assert containers(render())["gateway"]["args"] == ["gateway"]


# Notes


def notes(values: Object) -> str:
    done = helm("install", "blue", str(CHART), "--dry-run=client", "--namespace", "llm", values=values)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


@pytest.mark.parametrize("monitored", [True, False])
def test_the_notes_explain_how_to_call_the_gateway_and_warn(monitored: bool) -> None:
    text = notes(nested("metrics.serviceMonitor.enabled", monitored))
    assert "WARNING: no API key is required." in text
    assert "WARNING: nothing is encrypted." in text
    assert f"kubectl --namespace llm port-forward service/blue-quire-gateway {PORTS['gateway']['grpc']}\n" in text
    assert 'quire generate --chat "Why is the sky blue?"\n' in text
    assert "helm test blue --namespace llm" in text
    assert "fetches the model demo" in text
    assert ", ".join(f"{name} {PORTS[name]['metrics']}" for name in ("gateway", "engine", "kvmanager")) in text
    assert ("metrics.serviceMonitor.enabled=true" in text) is not monitored
    assert "For the alerts, set metrics.prometheusRule.enabled=true." in text


@pytest.mark.parametrize("monitored", [True, False])
def test_the_notes_name_the_series_that_rules_without_a_service_monitor_need(monitored: bool) -> None:
    text = notes({"metrics": {"prometheusRule": {"enabled": True}, "serviceMonitor": {"enabled": monitored}}})
    assert ("WARNING: metrics.prometheusRule is enabled without metrics.serviceMonitor." in text) is not monitored
    assert ("namespace=llm, release=blue" in text) is not monitored
    assert "set metrics.prometheusRule.runbookUrl" in text


def test_the_notes_state_that_clients_need_a_key_and_tls() -> None:
    text = notes(ci("tls"))
    assert "WARNING" not in text
    assert (
        'QUIRE_API_KEY=... quire generate --chat "Why is the sky blue?" --ca ca.crt --server-name blue-quire.llm.svc'
        in text
    )
    assert "get secret blue-quire-gateway-tls" in text
    assert "https://" in text


def test_the_notes_name_every_model() -> None:
    text = notes(ci("models"))
    assert "Qwen/Qwen2.5-7B-Instruct, HuggingFaceTB/SmolLM2-135M-Instruct" in text
    assert "--model small" in text
