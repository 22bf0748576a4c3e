"""values.yaml, its schema and its README agree, and every value has an effect."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.deployment.helm.chart import CHART, ROOT, SCHEMA, TYPES, VALUES, Object, merged, nested, render

GENERATE = ROOT / "helm" / "generate.py"


def objects_of(schema: Object, values: Object, path: str = "") -> Iterator[tuple[str, Object, Object]]:
    """Yield path, schema and values of each level with keys in the schema, except settings."""
    yield path, schema, values
    for key, inner in schema["properties"].items():
        if "properties" in inner and key not in ("settings", "thresholds"):
            yield from objects_of(inner, values[key], f"{path}.{key}")


LEVELS = list(objects_of(SCHEMA, VALUES))
LEVEL_IDS = [path or "top" for path, _, _ in LEVELS]


@pytest.mark.parametrize(("_path", "schema", "values"), LEVELS, ids=LEVEL_IDS)
def test_the_schema_lists_exactly_the_values(_path: str, schema: Object, values: Object) -> None:
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) - {"global"} == set(values)
    required = [key for key, value in values.items() if value != "" and not isinstance(value, dict | list)]
    assert schema.get("required", []) == required


def test_the_schema_is_valid() -> None:
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("component", TYPES)
def test_every_setting_is_in_the_schema_with_its_bounds_or_is_set_by_the_chart(component: str) -> None:
    set_by_the_chart = {
        *("listen", "http_listen", "metrics_listen", "map_listen", "kvmanager", "engines", "model", "engine_id"),
        *("keep_blocks", "pinned_prompts", "api_keys", "insecure"),
        *("kv_events_listen", "kv_events_replay_listen", "kv_events_insecure"),
        *("kv_events_curve_key", "kv_events_curve_clients"),
        *("tls_certificate", "tls_key", "tls_client_ca"),
        *("link_ca", "link_certificate", "link_key", "link_server_name"),
    }
    schema = SCHEMA["properties"][component]["properties"]["settings"]
    fields = {field.name: field for field in dataclasses.fields(TYPES[component])}
    assert fields.keys() - set_by_the_chart == schema["properties"].keys()
    assert (schema["additionalProperties"], schema["required"]) == (False, list(VALUES[component]["settings"]))
    for name, field_schema in schema["properties"].items():
        value = fields[name].default
        jsonschema.validate(value, field_schema)
        for bound, beyond in (("least", -1), ("most", 1)):
            if (limit := fields[name].metadata[bound]) is not None:
                with pytest.raises(jsonschema.ValidationError):
                    jsonschema.validate(type(value)(limit + beyond), field_schema)
        wrong: Any = "auto-" if isinstance(value, str) and fields[name].metadata["choices"] else {}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, field_schema)


@pytest.mark.parametrize("component", TYPES)
def test_settings_that_the_values_repeat_have_the_default_of_their_field(component: str) -> None:
    defaults = dataclasses.asdict(TYPES[component]())
    changed = {name: value for name, value in VALUES[component]["settings"].items() if value != defaults[name]}
    # Several gateways are behind one Service here, and ranks in several pods have 30 s from SIGTERM to SIGKILL.
    own = {"gateway": {"max_connection_age_seconds": 300}, "engine": {"grace_seconds": 25}}
    assert changed == own.get(component, {})


def test_a_model_can_override_every_value_of_engines() -> None:
    entry = SCHEMA["properties"]["models"]["items"]
    assert entry["required"] == ["name", "model"]
    assert entry["properties"].keys() - {"name", "model"} == SCHEMA["properties"]["engine"]["properties"].keys()
    jsonschema.validate({"name": "a", "model": "b", "settings": {}, "autoscaling": {"hpa": {}}}, entry)


# Generated files


def test_generated_files_are_current_and_changes_of_values_are_detected(tmp_path: Any) -> None:
    assert subprocess.run([sys.executable, GENERATE, "--check"], check=False).returncode == 0
    copy = tmp_path / "helm"
    subprocess.run(["cp", "-r", ROOT / "helm", copy], check=True)
    for folder in ("services", "engine", "protos", "kvmanager", "deploy", "pyproject.toml"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    values = copy / "quire" / "values.yaml"
    values.write_text(values.read_text().replace("preStopSeconds: 5", "preStopSeconds: 6"))
    check = [sys.executable, copy / "generate.py", "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "the chart is stale (helm/quire/README.md): run make chart\n"
    subprocess.run([sys.executable, copy / "generate.py"], check=True)
    assert subprocess.run(check, check=False).returncode == 0
    assert "| `gateway.preStopSeconds` | `6` |" in (copy / "quire" / "README.md").read_text()


def test_a_value_without_a_comment_is_found(tmp_path: Any) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from chart_values import values_of; values_of('a:\\n  b: 1')"
    )
    done = subprocess.run([sys.executable, "-c", program, GENERATE.parent], capture_output=True, text=True, check=False)
    assert "ValueError: a.b must have a comment above it that begins with `# -- `" in done.stderr


def test_the_readme_has_every_value_with_its_default() -> None:
    rows = (CHART / "README.md").read_text().splitlines()
    for path in leaves(VALUES):
        (row,) = [row for row in rows if row.startswith(f"| `{path}` | ")]
        value: Any = VALUES
        for key in path.split("."):
            value = value[key]
        assert row.startswith(f"| `{path}` | `{json.dumps(value)}` | ")
        assert len(row.split(" | ")[2]) > 10


# Every value

OPEN = {"gateway": {"insecure": True}}
TLS = {"tls": {"enabled": True, "existingSecrets": {"kvmanager": "k", "engine": "e", "gateway": "g"}}}
CERT_MANAGER = {"tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": {"name": "i"}}}}
PUBLIC = merged(TLS, {"tls": {"clients": {"existingSecret": "p", "serverName": "p.org"}}})
POLICY = nested("networkPolicy.enabled", True)
CLAIM = nested("modelCache.persistence.enabled", True)
MONITOR = nested("metrics.serviceMonitor.enabled", True)
RULE = nested("metrics.prometheusRule.enabled", True)
DASHBOARD = nested("metrics.dashboard.enabled", True)
KEYS = nested("gateway.apiKeys.existingSecret", "keys")
ENGINE_HPA = nested("engine.autoscaling.hpa.enabled", True)
KEDA = nested("engine.autoscaling.keda", {"enabled": True, "prometheusAddress": "http://p:9090"})
GATEWAY_HPA = nested("gateway", {"autoscaling": {"hpa": {"enabled": True}}, "resources": {"requests": {"cpu": 1}}})
MAP = nested("kvmanager.map.open", True)
PRIORITY = nested("kvmanager.priorityClass.create", True)
FETCH = {
    "modelFetch": {"enabled": True},
    "modelCache": {"persistence": {"enabled": True, "existingClaim": "models"}},
}
HTTP_ROUTE = nested("gateway", {"routes": {"http": {"enabled": True, "parentRefs": [{"name": "a"}]}}, "insecure": True})
GRPC_ROUTE = nested("gateway", {"routes": {"grpc": {"enabled": True, "parentRefs": [{"name": "a"}]}}, "insecure": True})
INGRESS = nested("gateway", {"ingress": {"enabled": True, "hosts": ["a.org"]}, "insecure": True})
POOL = {"engine": {"inferencePool": {"enabled": True}}, "gateway": {"insecure": True}}
EVENTS = nested("engine.kvEvents", {"enabled": True, "insecure": True})
PEER = [{"podSelector": {"matchLabels": {"app": "other"}}}]

# For each value a different one, and the values that it needs to have an effect.
OTHER_VALUES: dict[str, tuple[Any, Object]] = {
    "nameOverride": ("other", {}),
    "fullnameOverride": ("other", {}),
    "model": ("org/other", {}),
    "models": ([{"name": "a", "model": "org/a"}], {}),
    "image.repository": ("other", {}),
    "image.tag": ("other", {}),
    "image.digest": ("sha256:" + "0" * 64, {}),
    "image.pullPolicy": ("Always", {}),
    "imagePullSecrets": ([{"name": "other"}], {}),
    "modelCache.size": ("1Ti", {}),
    "modelCache.persistence.enabled": (True, {}),
    "modelCache.persistence.existingClaim": ("other", CLAIM),
    "modelCache.persistence.storageClassName": ("other", CLAIM),
    "modelCache.persistence.accessModes": (["ReadWriteOnce"], CLAIM),
    "terminationMarginSeconds": (1, {}),
    "revisionHistoryLimit": (2, {}),
    "podSecurityContext": ({"fsGroup": 7}, {}),
    "securityContext": ({"readOnlyRootFilesystem": False}, {}),
    "tls.enabled": (True, {"tls": {**CERT_MANAGER["tls"], "enabled": True}}),
    "tls.existingSecrets.kvmanager": ("other", TLS),
    "tls.existingSecrets.engine": ("other", TLS),
    "tls.existingSecrets.gateway": ("other", TLS),
    "tls.certManager.enabled": (True, CERT_MANAGER),
    "tls.certManager.issuerRef.name": ("other", CERT_MANAGER),
    "tls.certManager.issuerRef.kind": ("ClusterIssuer", CERT_MANAGER),
    "tls.certManager.issuerRef.group": ("other", CERT_MANAGER),
    "tls.certManager.duration": ("48h", CERT_MANAGER),
    "tls.certManager.renewBefore": ("24h", CERT_MANAGER),
    "tls.serverName": ("other", TLS),
    "tls.clients.existingSecret": ("other", PUBLIC),
    "tls.clients.serverName": ("other", PUBLIC),
    "tls.clients.dnsNames": (["other.org"], CERT_MANAGER),
    "tls.clients.requireCertificates": (True, TLS),
    "networkPolicy.enabled": (True, {}),
    "networkPolicy.clients": (PEER, POLICY),
    "networkPolicy.metrics": (PEER, POLICY),
    "networkPolicy.map": (PEER, merged(POLICY, MAP)),
    "networkPolicy.routers": (PEER, POLICY),
    "networkPolicy.dns": (PEER, POLICY),
    "networkPolicy.modelSources": ([], POLICY),
    "networkPolicy.extraEgress": ([{"ports": [{"port": 4317}]}], POLICY),
    "metrics.serviceMonitor.enabled": (True, {}),
    "metrics.serviceMonitor.interval": ("1m", MONITOR),
    "metrics.serviceMonitor.scrapeTimeout": ("5s", MONITOR),
    "metrics.serviceMonitor.labels": ({"release": "other"}, MONITOR),
    "metrics.prometheusRule.enabled": (True, {}),
    "metrics.prometheusRule.preset": ("gpu", RULE),
    "metrics.prometheusRule.thresholds": ({"minErrors": 7}, RULE),
    "metrics.prometheusRule.labels": ({"release": "other"}, RULE),
    "metrics.prometheusRule.runbookUrl": ("https://wiki.example.org/alerts.html", RULE),
    "metrics.dashboard.enabled": (True, {}),
    "metrics.dashboard.labels": ({"grafana_dashboard": "other"}, DASHBOARD),
    "test.apiKey.existingSecret": ("other", KEYS),
    "test.apiKey.key": ("other", merged(KEYS, nested("test.apiKey.existingSecret", "key"))),
    "extraObjects": ([{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "other"}}], {}),
    "modelFetch.enabled": (True, {"modelCache": FETCH["modelCache"]}),
    "modelFetch.timeoutSeconds": (9, FETCH),
    "modelFetch.retries": (9, FETCH),
    "modelFetch.ttlSeconds": (9, FETCH),
    "modelFetch.resources": ({"limits": {"cpu": 1}}, FETCH),
    "modelFetch.serviceAccountName": ("other", FETCH),
    "modelFetch.podAnnotations": ({"a": "b"}, FETCH),
    "modelFetch.podLabels": ({"a": "b"}, FETCH),
    "modelFetch.nodeSelector": ({"a": "b"}, FETCH),
    "modelFetch.tolerations": ([{"key": "other", "operator": "Exists"}], FETCH),
    "kvmanager.map.open": (True, {}),
    "kvmanager.lostNodeSeconds": (20, {}),
    "kvmanager.priorityClass.create": (True, {}),
    "kvmanager.priorityClass.value": (7, PRIORITY),
    "kvmanager.priorityClass.preemptionPolicy": ("Never", PRIORITY),
    "engine.settings.seconds_without_kvmanager": (60, {}),
    "engine.shmSize": ("2Gi", {}),
    "engine.keepBlocks.enabled": (True, {}),
    "engine.keepBlocks.sizeLimit": ("1100Mi", nested("engine.keepBlocks.enabled", True)),
    "engine.ranks.pods": (2, {"engine": {"settings": {"tensor_parallel": 2, "grace_seconds": 20}}}),
    "engine.ranks.port": (
        29600,
        {"engine": {"settings": {"tensor_parallel": 2, "grace_seconds": 20}, "ranks": {"pods": 2}}},
    ),
    "engine.podGateway.resources": ({"limits": {"cpu": 1}}, nested("engine.podGateway.enabled", True)),
    "engine.inferencePool.endpointPicker.name": ("other", POOL),
    "engine.inferencePool.endpointPicker.port": (9, POOL),
    "engine.inferencePool.endpointPicker.failureMode": ("FailOpen", POOL),
    "engine.kvEvents.enabled": (True, EVENTS),
    "engine.kvEvents.curve.existingSecret": ("other", nested("engine.kvEvents.enabled", True)),
    "engine.kvEvents.insecure": (True, EVENTS),
    "engine.runtimeClassName": ("other", {}),
    "engine.writableRootFilesystem": (True, {}),
    "engine.autoscaling.waitingRequests": (9, ENGINE_HPA),
    "engine.autoscaling.runningRequests": (9, ENGINE_HPA),
    "engine.autoscaling.scaleDownSeconds": (9, ENGINE_HPA),
    "engine.autoscaling.hpa.extraMetrics": ([{"type": "Resource"}], ENGINE_HPA),
    "engine.autoscaling.keda.enabled": (True, KEDA),
    "engine.autoscaling.keda.prometheusAddress": ("http://other", KEDA),
    "engine.autoscaling.keda.authenticationRef": ("other", KEDA),
    "engine.autoscaling.keda.pollingSeconds": (9, KEDA),
    "engine.autoscaling.keda.fallbackReplicas": (3, KEDA),
    "engine.autoscaling.keda.extraTriggers": ([{"type": "cron"}], KEDA),
    "gateway.preStopSeconds": (9, {}),
    "gateway.service.type": ("LoadBalancer", OPEN),
    "gateway.service.annotations": ({"a": "b"}, {}),
    "gateway.settings.max_connection_age_seconds": (60, {}),
    "gateway.antiAffinity": ("none", {}),
    "gateway.headlessService.enabled": (True, {}),
    "gateway.routes.http.enabled": (True, HTTP_ROUTE),
    "gateway.routes.http.parentRefs": ([{"name": "other"}], HTTP_ROUTE),
    "gateway.routes.http.hostnames": (["other.org"], HTTP_ROUTE),
    "gateway.routes.http.timeout": ("1h", HTTP_ROUTE),
    "gateway.routes.http.annotations": ({"a": "b"}, HTTP_ROUTE),
    "gateway.routes.grpc.enabled": (True, GRPC_ROUTE),
    "gateway.routes.grpc.parentRefs": ([{"name": "other"}], GRPC_ROUTE),
    "gateway.routes.grpc.hostnames": (["other.org"], GRPC_ROUTE),
    "gateway.routes.grpc.annotations": ({"a": "b"}, GRPC_ROUTE),
    "gateway.ingress.enabled": (True, nested("gateway", {"ingress": {"hosts": ["a.org"]}, "insecure": True})),
    "gateway.ingress.className": ("other", INGRESS),
    "gateway.ingress.annotations": ({"a": "b"}, INGRESS),
    "gateway.ingress.hosts": (["other.org"], INGRESS),
    "gateway.ingress.tls": ([{"hosts": ["a.org"], "secretName": "a"}], INGRESS),
    "gateway.apiKeys.existingSecret": ("other", {}),
    "gateway.pinnedPrompts": ([{"name": "support", "chat": [{"role": "system", "content": 'it\'s: "brief"\n'}]}], {}),
    "gateway.autoscaling.cpuPercent": (9, GATEWAY_HPA),
}
for _component, _hpa in (("engine", ENGINE_HPA), ("gateway", GATEWAY_HPA)):
    _budget = nested(f"{_component}.podDisruptionBudget.enabled", True)
    OTHER_VALUES |= {
        f"{_component}.replicas": (3, {}),
        f"{_component}.rollingUpdate.maxSurge": ("50%", {}),
        f"{_component}.rollingUpdate.maxUnavailable": (2, {}),
        f"{_component}.podDisruptionBudget.enabled": (True, {}),
        f"{_component}.podDisruptionBudget.minAvailable": (1, merged(_budget, nested(f"{_component}.replicas", 2))),
        f"{_component}.podDisruptionBudget.maxUnavailable": (2, _budget),
        f"{_component}.autoscaling.minReplicas": (4, _hpa),
        f"{_component}.autoscaling.maxReplicas": (9, _hpa),
        f"{_component}.autoscaling.hpa.enabled": (True, nested("gateway.resources.requests.cpu", 1)),
    }
for _component in TYPES:
    OTHER_VALUES |= {
        f"{_component}.settings.grace_seconds": (44, {}),
        f"{_component}.terminationGracePeriodSeconds": (99, {}),
        f"{_component}.startupFailureThreshold": (99, {}),
        f"{_component}.resources": ({"requests": {"cpu": "700m"}, "limits": {"memory": "2Gi"}}, {}),
        f"{_component}.serviceAccount.create": (False, {}),
        f"{_component}.serviceAccount.name": ("other", {}),
        f"{_component}.serviceAccount.annotations": ({"a": "b"}, {}),
        f"{_component}.extraArgs": (["--metrics-listen="], {}),
        f"{_component}.extraEnv": (
            [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "o", "key": "t"}}}],
            {},
        ),
        f"{_component}.extraEnvFrom": ([{"configMapRef": {"name": "other"}}], {}),
        f"{_component}.extraVolumes": ([{"name": "other", "emptyDir": {}}], {}),
        f"{_component}.extraVolumeMounts": ([{"name": "tmp", "mountPath": "/var/tmp"}], {}),
        f"{_component}.initContainers": ([{"name": "other", "image": "other"}], {}),
        f"{_component}.extraContainers": ([{"name": "other", "image": "other"}], {}),
        f"{_component}.podAnnotations": ({"example.org/other": "true"}, {}),
        f"{_component}.podLabels": ({"example.org/other": "true"}, {}),
        f"{_component}.nodeSelector": ({"example.org/other": "true"}, {}),
        f"{_component}.tolerations": ([{"key": "other", "operator": "Exists"}], {}),
        f"{_component}.affinity": ({"podAffinity": {}}, {}),
        f"{_component}.topologySpreadConstraints": (
            [{"maxSkew": 1, "topologyKey": "other", "whenUnsatisfiable": "ScheduleAnyway"}],
            {},
        ),
        f"{_component}.priorityClassName": ("other", {}),
    }
# Values that change no render.
ALLOWS = {"gateway.insecure": "allows a public gateway, which is refused without it: see test_refusals.py"}
# Values that change objects of several components.
ACROSS = {
    "kvmanager.placement": ("engine", {}),
    "engine.podGateway.enabled": (True, {}),
    "engine.inferencePool.enabled": (True, {"gateway": {"insecure": True}}),
    "engine.aibrix.enabled": (True, {}),
}
# Values that are part of what they need.
SWITCHES = {
    *("tls.enabled", "tls.certManager.enabled", "engine.autoscaling.keda.enabled"),
    *("gateway.routes.http.enabled", "gateway.routes.grpc.enabled"),
    *("engine.kvEvents.enabled", "engine.kvEvents.insecure", "engine.kvEvents.curve.existingSecret"),
}


def leaves(values: Object, path: str = "") -> Iterator[str]:
    whole = ("podSecurityContext", "securityContext", "labels", "resources")
    for key, value in values.items():
        if isinstance(value, dict) and value and key not in whole:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key


def test_the_tested_values_are_all_values() -> None:
    assert OTHER_VALUES.keys() | ALLOWS.keys() | ACROSS.keys() == set(leaves(VALUES))


@pytest.mark.parametrize("path", OTHER_VALUES | ACROSS)
def test_every_value_changes_the_render(path: str) -> None:
    value, needs = (OTHER_VALUES | ACROSS)[path]
    before = render({} if path in SWITCHES else needs)
    after = render(merged(needs, nested(path, value)))
    assert after != before
    component = path.split(".")[0]
    if (
        component in TYPES
        and path not in ACROSS
        and path not in ("gateway.apiKeys.existingSecret", "gateway.service.type")
    ):
        changed = [item for item in after if item not in before] + [item for item in before if item not in after]
        assert {item["metadata"]["labels"].get("app.kubernetes.io/component") for item in changed} == {component}
