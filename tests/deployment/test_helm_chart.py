"""The Helm chart as it renders, held against Kubernetes' schemas and what the `quire` command reads. No cluster."""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as kubernetes

from services.cli.main import cli
from services.cli.options import settings_from
from services.engine.settings import EngineSettings
from services.gateway.pinned_prompts import read
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KVManagerSettings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "quire"
HELM = os.environ.get("HELM") or shutil.which("helm")

ABOUT = yaml.safe_load((CHART / "Chart.yaml").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
CI_VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
CI_IDS = [path.stem for path in CI_VALUES]
GPU = yaml.safe_load((CHART / "ci" / "gpu-values.yaml").read_text())

TYPES: dict[str, type[Any]] = {"kvmanager": KVManagerSettings, "engine": EngineSettings, "gateway": GatewaySettings}
PORTS = {
    "kvmanager": {"grpc": 50053, "metrics": 9153},
    "engine": {"grpc": 50052, "metrics": 9152},
    "gateway": {"grpc": 50051, "metrics": 9151, "http": 8000},
}
HEALTH = {"kvmanager": "quire.v1.KVManager", "engine": "quire.v1.Engine", "gateway": "quire.v1.Gateway"}
# Settings that the chart itself makes.
OF_THE_CHART = {
    *(
        "listen",
        "http_listen",
        "metrics_listen",
        "kvmanager",
        "engines",
        "model",
        "engine_id",
        "pinned_prompts",
        "api_keys",
        "insecure",
    ),
    # Kubernetes' gRPC probes speak no TLS, so pods have none.
    *("tls_certificate", "tls_key", "tls_client_ca", "link_ca", "link_certificate", "link_key", "link_server_name"),
}

OLDEST_ALLOWED = re.fullmatch(r">=(\d+\.\d+)\.0-0", ABOUT["kubeVersion"])[1]
KUBERNETES = [
    version
    for version in kubernetes.all_versions()
    if [int(part) for part in version.split(".")] >= [int(part) for part in OLDEST_ALLOWED.split(".")]
]

Object = dict[str, Any]


def helm(*arguments: str, values: Object | None = None) -> "subprocess.CompletedProcess[str]":
    if not HELM:
        pytest.skip("helm is not installed: put it on the PATH, or name it in the variable HELM")
    command = [HELM, *arguments, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), text=True, capture_output=True, check=False)


def render(values: Object | None = None, *arguments: str, release: str = "blue") -> list[Object]:
    """Return the objects that the chart makes of these values."""
    done = helm("template", release, str(CHART), *arguments, values=values)
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def only(objects: list[Object], kind: str) -> Object:
    (found,) = of_kind(objects, kind)
    return found


def by_component(objects: list[Object], kind: str) -> dict[str, Object]:
    found = {item["metadata"]["labels"]["app.kubernetes.io/component"]: item for item in of_kind(objects, kind)}
    assert sorted(found) == sorted(TYPES)
    assert len(of_kind(objects, kind)) == len(TYPES)
    return found


def pods(objects: list[Object]) -> dict[str, Object]:
    """Return the pod templates."""
    return {name: item["spec"]["template"] for name, item in by_component(objects, "Deployment").items()}


def containers(objects: list[Object]) -> dict[str, Object]:
    found = {}
    for name, pod in pods(objects).items():
        assert "initContainers" not in pod["spec"]
        (found[name],) = pod["spec"]["containers"]
    return found


def variables(container: Object) -> dict[str, str]:
    """Return the container's variables that have a value, after checking that none is given twice."""
    names = [variable["name"] for variable in container["env"]]
    assert len(names) == len(set(names))
    return {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}


def volumes(pod: Object) -> dict[str, Object]:
    """Return the volume that is mounted at each path."""
    named = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    (container,) = pod["spec"]["containers"]
    mounted = {mount["mountPath"]: named.pop(mount["name"]) for mount in container["volumeMounts"]}
    assert named == {}
    return mounted


def merged(*several: Object) -> Object:
    """Return the values that Helm makes of several files of them."""
    result: Object = {}
    for values in several:
        for key, value in values.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def nested(path: str, value: Any) -> Object:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.fixture(scope="module")
def default() -> list[Object]:
    return render()


@pytest.fixture(scope="module")
def gpu() -> list[Object]:
    return render(GPU)


# Valid for Helm and for Kubernetes


@pytest.mark.parametrize("path", CI_VALUES, ids=CI_IDS)
def test_the_chart_passes_lint(path: Path) -> None:
    done = helm("lint", "--strict", str(CHART), "--values", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def assert_valid(objects: list[Object], version: str) -> None:
    monitor = json.loads(Path(__file__).with_name("servicemonitor.schema.json").read_text())
    for item in objects:
        if item["kind"] == "ServiceMonitor":  # of the Prometheus operator: Kubernetes does not know it
            jsonschema.validate(item, monitor)
        else:
            checked = kubernetes.validate(item, version, strict=True)
            assert checked == kubernetes.major_minor(version)


@pytest.mark.parametrize("version", [KUBERNETES[0], KUBERNETES[-1]])
@pytest.mark.parametrize("path", CI_VALUES, ids=CI_IDS)
def test_every_object_is_valid_on_the_oldest_and_the_newest_kubernetes(path: Path, version: str) -> None:
    objects = render(None, "--values", str(path), "--kube-version", version)
    assert len(objects) >= 2 * len(TYPES)
    assert_valid(objects, version)


def test_a_kubernetes_without_grpc_probes_is_refused() -> None:
    assert OLDEST_ALLOWED == "1.27"
    done = helm("template", "blue", str(CHART), "--kube-version", "1.26.15")
    assert done.returncode != 0
    assert "requires kubeVersion: >=1.27.0-0" in done.stderr


def test_by_default_there_are_three_deployments_with_their_services_and_nothing_else(default: list[Object]) -> None:
    assert sorted(item["kind"] for item in default) == ["Deployment"] * 3 + ["Service"] * 3


def test_the_charts_app_is_the_version_of_the_package() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert ABOUT["appVersion"] == package["project"]["version"]


# Values and their schema


def objects_of(schema: Object, values: Object, path: str = "") -> Iterator[tuple[str, Object, Object]]:
    """Yield path, schema and values of each level that the schema lists keys for, settings excepted."""
    yield path, schema, values
    for key, inner in schema["properties"].items():
        if "properties" in inner and key != "settings":
            yield from objects_of(inner, values[key], f"{path}.{key}")


LEVELS = list(objects_of(SCHEMA, VALUES))
LEVEL_IDS = [path or "top" for path, _, _ in LEVELS]


@pytest.mark.parametrize(("_path", "schema", "values"), LEVELS, ids=LEVEL_IDS)
def test_the_schema_lists_exactly_the_values_that_there_are(_path: str, schema: Object, values: Object) -> None:
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) - {"global"} == set(values)
    needed = [key for key, value in values.items() if value != "" and not isinstance(value, dict | list)]
    assert schema.get("required", []) == needed


def test_the_schema_is_a_schema() -> None:
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("component", TYPES)
def test_the_schema_says_of_each_setting_what_its_field_says(component: str) -> None:
    names = {str: "string", int: "integer", float: "number", bool: "boolean"}
    expected = {}
    for field in dataclasses.fields(TYPES[component]):
        bounds = {"minimum": field.metadata["least"], "maximum": field.metadata["most"]}
        expected[field.name] = {
            "description": field.metadata["meaning"],
            "type": names[type(field.default)],
            **{name: bound for name, bound in bounds.items() if bound is not None},
            **({"enum": list(field.metadata["choices"])} if field.metadata["choices"] else {}),
        }
    schema = SCHEMA["properties"][component]["properties"]["settings"]
    assert schema["properties"] == {name: says for name, says in expected.items() if name not in OF_THE_CHART}
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["grace_seconds"]


@pytest.mark.parametrize("component", TYPES)
def test_settings_that_the_values_repeat_have_the_default_of_their_field(component: str) -> None:
    assert VALUES[component]["settings"] == {"grace_seconds": TYPES[component]().grace_seconds}


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("gatway", {}, "at '': additional properties 'gatway' not allowed"),
        ("engine.settings.blocksize", 16, "at '/engine/settings': additional properties 'blocksize' not allowed"),
        ("engine.settings.listen", "x:1", "at '/engine/settings': additional properties 'listen' not allowed"),
        ("engine.settings.block_size", 0, "at '/engine/settings/block_size': minimum: got 0, want 1"),
        ("engine.settings.block_size", 5000, "at '/engine/settings/block_size': maximum: got 5,000, want 4,096"),
        ("engine.settings.token_budget", "512", "at '/engine/settings/token_budget': got string, want integer"),
        ("engine.settings.dtype", "float8", "at '/engine/settings/dtype': value must be one of 'auto', 'float32'"),
        ("gateway.settings.grace_seconds", -1, "at '/gateway/settings/grace_seconds': minimum: got -1, want 0"),
        ("gateway.settings.grace_seconds", None, "at '/gateway/settings': missing property 'grace_seconds'"),
        ("engine.replicas", 0, "at '/engine/replicas': minimum: got 0, want 1"),
        ("gateway.replicas", 0, "at '/gateway/replicas': minimum: got 0, want 1"),
        ("gateway.apiKeys.secret", "x", "at '/gateway/apiKeys': additional properties 'secret' not allowed"),
        ("gateway.service.type", "Public", "at '/gateway/service/type': value must be one of 'ClusterIP', 'NodePort'"),
        ("terminationMarginSeconds", 0, "at '/terminationMarginSeconds': minimum: got 0, want 1"),
        ("image.pullPolicy", "Sometimes", "at '/image/pullPolicy': value must be one of 'Always', 'IfNotPresent'"),
        ("image.digest", "sha256:0", "at '/image/digest': 'sha256:0' does not match pattern"),
        ("modelCache.size", "20 GB", "at '/modelCache/size': '20 GB' does not match pattern"),
        ("metrics.serviceMonitor.interval", "30", "at '/metrics/serviceMonitor/interval': '30' does not match"),
        ("metrics.serviceMonitor.interval", "", "at '/metrics/serviceMonitor/interval': minLength: got 0, want 2"),
        ("engine.nodeSelector", {"gpu": True}, "at '/engine/nodeSelector/gpu': got boolean, want string"),
    ],
)
def test_a_wrong_value_is_refused_naming_its_path_and_bound(path: str, value: Any, complaint: str) -> None:
    done = helm("template", "blue", str(CHART), values=nested(path, value))
    assert done.returncode != 0
    assert complaint in done.stderr


def test_a_chart_that_contains_this_one_may_have_global_values() -> None:
    assert render({"global": {"region": "north"}})


# Of each value another than in gpu-values.yaml, where everything is turned on.
OTHER_VALUES = {
    "nameOverride": "other",
    "fullnameOverride": "other",
    "model": "org/other",
    "image.repository": "other",
    "image.tag": "other",
    "image.digest": "sha256:" + "0" * 64,
    "image.pullPolicy": "Always",
    "imagePullSecrets": [{"name": "other"}],
    "modelCache.size": "1Ti",
    "modelCache.persistence.enabled": False,
    "modelCache.persistence.existingClaim": "other",
    "modelCache.persistence.storageClassName": "other",
    "modelCache.persistence.accessModes": ["ReadWriteOnce"],
    "terminationMarginSeconds": 1,
    "metrics.serviceMonitor.enabled": False,
    "metrics.serviceMonitor.interval": "1m",
    "metrics.serviceMonitor.scrapeTimeout": "5s",
    "metrics.serviceMonitor.labels": {"release": "other"},
    "metrics.dashboard.enabled": False,
    "metrics.dashboard.labels": {"grafana_dashboard": "other"},
    "engine.shmSize": "2Gi",
    "engine.runtimeClassName": "other",
    "engine.writableRootFilesystem": True,
    "engine.replicas": 2,
    "gateway.replicas": 3,
    "gateway.pinnedPrompts": [{"name": "support", "chat": [{"role": "system", "content": 'it\'s: "brief"\n'}]}],
    "gateway.service.type": "LoadBalancer",
    "gateway.apiKeys.existingSecret": "other",
}
for _component in TYPES:
    OTHER_VALUES |= {
        f"{_component}.settings.grace_seconds": 99,
        f"{_component}.startupFailureThreshold": 99,
        f"{_component}.resources": {"requests": {"cpu": "500m"}, "limits": {"memory": "1Gi"}},
        f"{_component}.extraEnv": [
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "other", "key": "token"}}}
        ],
        f"{_component}.podAnnotations": {"example.org/other": "true"},
        f"{_component}.podLabels": {"example.org/other": "true"},
        f"{_component}.nodeSelector": {"example.org/other": "true"},
        f"{_component}.tolerations": [{"key": "other", "operator": "Exists"}],
        f"{_component}.affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "other", "operator": "Exists"}]}]
                }
            }
        },
        f"{_component}.topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "other", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        f"{_component}.priorityClassName": "other",
    }


def leaves(values: Object, path: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value and key != "labels":
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key


def test_the_other_values_are_all_that_there_are() -> None:
    assert set(OTHER_VALUES) == set(leaves(VALUES))


@pytest.mark.parametrize("path", OTHER_VALUES)
def test_every_value_changes_what_is_rendered(path: str, gpu: list[Object]) -> None:
    objects = render(merged(GPU, nested(path, OTHER_VALUES[path])))
    component = path.split(".")[0]
    if component in TYPES:
        kind = "Service" if ".service." in path else "Deployment"
        before, after = by_component(gpu, kind), by_component(objects, kind)
        assert [name for name in TYPES if before[name] != after[name]] == [component]
    else:
        assert objects != gpu


def test_other_values_are_valid_in_kubernetes_too() -> None:
    hiding = re.compile(r"enabled$|existingClaim$")  # they take away what others would show in
    others = [nested(path, value) for path, value in OTHER_VALUES.items() if not hiding.search(path)]
    assert_valid(render(merged(GPU, *others)), KUBERNETES[-1])


# Settings


@pytest.mark.parametrize("component", TYPES)
def test_the_command_reads_every_variable_that_the_chart_sets(component: str, default: list[Object]) -> None:
    read = {f"QUIRE_{component}_{option.name}".upper() for option in cli.commands[component].params}
    container = containers(default)[component]
    assert {variable["name"] for variable in container["env"]} - read == set()
    assert container["args"] == [component]
    assert "command" not in container, "the image's entry point is `quire`"


def parse(component: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """Return the settings, and all options, that `quire COMPONENT` finds in this environment."""
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with cli.make_context("quire", [component], auto_envvar_prefix="QUIRE") as group:
        command = cli.commands[component]
        with command.make_context(component, [], parent=group) as context:
            return settings_from(TYPES[component], context.params), context.params


def another_value(field: "dataclasses.Field[Any]") -> Any:
    """Return a value that is not the default: for a number a large one, which Helm likes to write as 1e+06."""
    if field.metadata["choices"]:
        return field.metadata["choices"][-1]
    if isinstance(field.default, str):
        return 'it\'s: "something" else'
    return type(field.default)(field.metadata["most"] or 2_000_000)


@pytest.mark.parametrize("component", TYPES)
def test_every_setting_reaches_its_service(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = SCHEMA["properties"][component]["properties"]["settings"]["properties"]
    fields = [field for field in dataclasses.fields(TYPES[component]) if field.name in names]
    values = {field.name: another_value(field) for field in fields}
    objects = render({component: {"settings": values}})
    settings, _ = parse(component, variables(containers(objects)[component]), monkeypatch)
    assert {name: getattr(settings, name) for name in values} == values


def test_a_setting_of_zero_reaches_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = render({"engine": {"settings": {"grace_seconds": 0, "seconds_without_kvmanager": 0}}})
    settings, _ = parse("engine", variables(containers(objects)["engine"]), monkeypatch)
    assert (settings.grace_seconds, settings.seconds_without_kvmanager) == (0, 0)


@pytest.mark.parametrize("component", TYPES)
def test_a_service_listens_where_its_pod_says(
    component: str, default: list[Object], monkeypatch: pytest.MonkeyPatch
) -> None:
    container = containers(default)[component]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == PORTS[component]
    settings, options = parse(component, variables(container), monkeypatch)
    assert settings.listen == f"0.0.0.0:{ports['grpc']}"
    assert options["metrics_listen"] == f"0.0.0.0:{ports['metrics']}"
    if component == "gateway":
        assert settings.http_listen == f"0.0.0.0:{ports['http']}"


def test_the_services_find_each_other_and_the_gateway_every_engine(
    gpu: list[Object], monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = {
        f"{item['metadata']['name']}:{port['port']}": name
        for name, item in by_component(gpu, "Service").items()
        for port in item["spec"]["ports"]
        if port["name"] == "grpc"
    }
    engine, _ = parse("engine", variables(containers(gpu)["engine"]), monkeypatch)
    gateway, _ = parse("gateway", variables(containers(gpu)["gateway"]), monkeypatch)
    assert addresses[engine.kvmanager] == "kvmanager"
    assert addresses[gateway.kvmanager] == "kvmanager"
    assert addresses[gateway.engines.removeprefix("dns:")] == "engine"
    assert by_component(gpu, "Service")["engine"]["spec"]["clusterIP"] == "None", "the name stands for all pods"
    assert engine.model == GPU["model"]


def test_the_engines_id_is_the_name_of_its_pod(default: list[Object]) -> None:
    (variable,) = [one for one in containers(default)["engine"]["env"] if one["name"] == "QUIRE_ENGINE_ENGINE_ID"]
    assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


def test_other_services_of_the_namespace_set_no_variables(default: list[Object]) -> None:
    assert [pod["spec"]["enableServiceLinks"] for pod in pods(default).values()] == [False] * 3


# Names, labels, Services


def test_each_service_selects_the_pods_of_its_workload_and_no_others(default: list[Object]) -> None:
    other_release = render(release="green")
    everywhere = [pod["metadata"]["labels"] for objects in (default, other_release) for pod in pods(objects).values()]
    deployments = by_component(default, "Deployment")
    for name, service in by_component(default, "Service").items():
        selector = service["spec"]["selector"]
        selected = [labels for labels in everywhere if selector.items() <= labels.items()]
        assert selected == [pods(default)[name]["metadata"]["labels"]]
        assert deployments[name]["spec"]["selector"]["matchLabels"] == selector


@pytest.mark.parametrize("component", TYPES)
def test_the_ports_of_a_service_lead_to_those_of_its_pods(component: str, default: list[Object]) -> None:
    service = by_component(default, "Service")[component]["spec"]
    assert service["type"] == "ClusterIP"
    ports = [(port["name"], port["port"], port["targetPort"]) for port in service["ports"]]
    assert ports == [(name, port, name) for name, port in PORTS[component].items()]


@pytest.mark.parametrize(
    ("release", "values", "name"),
    [
        ("blue", {}, "blue-quire-engine"),
        ("my-quire", {}, "my-quire-engine"),
        ("blue", {"nameOverride": "llm"}, "blue-llm-engine"),
        ("blue", {"fullnameOverride": "llm"}, "llm-engine"),
        ("r" * 53, {}, "r" * 53 + "-engine"),
        ("blue", {"fullnameOverride": "f" * 60}, "f" * 53 + "-engine"),
    ],
)
def test_objects_are_named_after_the_release(release: str, values: Object, name: str) -> None:
    objects = render(merged(GPU, values), release=release)
    assert by_component(objects, "Deployment")["engine"]["metadata"]["name"] == name
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(names) == len(set(names))
    common = name.removesuffix("-engine")
    assert [one for _, one in names if len(one) > 63 or not one.startswith(common)] == []


def test_every_object_has_the_standard_labels(gpu: list[Object]) -> None:
    expected = {
        "helm.sh/chart": f"quire-{ABOUT['version']}",
        "app.kubernetes.io/name": "quire",
        "app.kubernetes.io/instance": "blue",
        "app.kubernetes.io/version": ABOUT["appVersion"],
        "app.kubernetes.io/part-of": "quire",
        "app.kubernetes.io/managed-by": "Helm",
    }
    for item in gpu:
        assert expected.items() <= item["metadata"]["labels"].items(), item["metadata"]["name"]


# Starting, living, ending


@pytest.mark.parametrize("component", TYPES)
def test_readiness_asks_for_the_service_and_liveness_only_for_the_process(
    component: str, default: list[Object]
) -> None:
    container = containers(default)[component]
    port = PORTS[component]["grpc"]
    assert container["startupProbe"]["grpc"] == container["livenessProbe"]["grpc"] == {"port": port}
    assert container["readinessProbe"]["grpc"] == {"port": port, "service": HEALTH[component]}
    periods = [container[f"{probe}Probe"]["periodSeconds"] for probe in ("startup", "liveness", "readiness")]
    assert periods == [10, 10, 5]
    assert container["livenessProbe"]["failureThreshold"] == 3


def test_a_model_may_take_half_an_hour_to_come(default: list[Object]) -> None:
    probe = containers(default)["engine"]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 1800


@pytest.mark.parametrize("component", TYPES)
def test_a_rollout_waits_longer_than_a_container_may_take_to_start(component: str) -> None:
    objects = render({component: {"startupFailureThreshold": 1000}})
    assert containers(objects)[component]["startupProbe"]["failureThreshold"] == 1000
    assert by_component(objects, "Deployment")[component]["spec"]["progressDeadlineSeconds"] > 10 * 1000


@pytest.mark.parametrize("component", TYPES)
@pytest.mark.parametrize("grace_seconds", [None, 0, 0.5, 120, 7200.25])
def test_kubernetes_waits_longer_than_a_service_takes_to_drain(component: str, grace_seconds: float | None) -> None:
    values = {} if grace_seconds is None else {component: {"settings": {"grace_seconds": grace_seconds}}}
    drain = TYPES[component]().grace_seconds if grace_seconds is None else grace_seconds
    objects = render(values)
    assert pods(objects)[component]["spec"]["terminationGracePeriodSeconds"] == math.ceil(drain) + 15


def test_only_gateways_can_be_many_and_are_replaced_one_by_one(gpu: list[Object]) -> None:
    found = {
        name: (item["spec"]["replicas"], item["spec"]["strategy"]["type"])
        for name, item in by_component(gpu, "Deployment").items()
    }
    assert found == {"kvmanager": (1, "Recreate"), "engine": (1, "Recreate"), "gateway": (2, "RollingUpdate")}


# Security


@pytest.mark.parametrize("path", CI_VALUES, ids=CI_IDS)
@pytest.mark.parametrize("component", TYPES)
def test_a_pod_has_no_rights_that_it_does_not_need(component: str, path: Path) -> None:
    pod = pods(render(None, "--values", str(path)))[component]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert volumes(pod)["/tmp"] == {"name": "tmp", "emptyDir": {}}
    assert not pod["spec"].keys() & {"hostNetwork", "hostPID", "hostIPC"}


def test_the_pods_user_is_the_images() -> None:
    assert "USER 10001:10001" in (ROOT / "Dockerfile").read_text().splitlines()


def test_nothing_names_a_registry(gpu: list[Object], default: list[Object]) -> None:
    images = [container["image"] for objects in (gpu, default) for container in containers(objects).values()]
    assert set(images) == {"quire:0.1.0", "quire:0.1.0-cuda"}
    hosts = re.compile(
        r"docker\.(io|com)|ghcr\.io|quay\.io|gcr\.io|nvcr\.io|pkg\.dev|k8s\.io|azurecr|amazonaws|registry\."
    )
    files = [path for path in CHART.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path.name for path in files if hosts.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({}, f"quire:{ABOUT['appVersion']}"),
        ({"tag": "next"}, "quire:next"),
        ({"tag": "next", "digest": "sha256:" + "a" * 64}, "quire@sha256:" + "a" * 64),
        ({"repository": "here/quire"}, f"here/quire:{ABOUT['appVersion']}"),
    ],
)
def test_all_services_run_one_image_and_a_digest_wins_over_the_tag(image: Object, expected: str) -> None:
    assert {container["image"] for container in containers(render({"image": image})).values()} == {expected}


# Models and GPUs


def test_models_are_kept_where_the_image_expects_them() -> None:
    assert "QUIRE_CACHE=/var/cache/quire" in (ROOT / "Dockerfile").read_text()


def test_without_persistence_each_engine_keeps_the_model_for_itself(default: list[Object]) -> None:
    own = {"name": "model-cache", "emptyDir": {"sizeLimit": VALUES["modelCache"]["size"]}}
    found = {name: volumes(pod).get("/var/cache/quire") for name, pod in pods(default).items()}
    assert found == {"kvmanager": None, "engine": own, "gateway": None}


def claim_of_engines(objects: list[Object]) -> str:
    """Return the name of the claim that engines mount."""
    name: str = volumes(pods(objects)["engine"])["/var/cache/quire"]["persistentVolumeClaim"]["claimName"]
    return name


def test_a_claim_is_shared_and_can_be_mounted_on_several_nodes(gpu: list[Object]) -> None:
    claim = only(gpu, "PersistentVolumeClaim")
    assert claim_of_engines(gpu) == claim["metadata"]["name"]
    assert claim["spec"] == {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "50Gi"}}}


def test_an_existing_claim_is_used_and_none_made() -> None:
    objects = render({"modelCache": {"persistence": {"enabled": True, "existingClaim": "models"}}})
    assert claim_of_engines(objects) == "models"
    assert of_kind(objects, "PersistentVolumeClaim") == []


def test_the_engine_alone_asks_for_the_gpu_and_for_a_node_that_has_one(gpu: list[Object]) -> None:
    requests = {name: container.get("resources") for name, container in containers(gpu).items()}
    assert requests == {"kvmanager": None, "engine": {"limits": {"nvidia.com/gpu": 1}}, "gateway": None}
    spec = pods(gpu)["engine"]["spec"]
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    for name in ("kvmanager", "gateway"):
        assert not pods(gpu)[name]["spec"].keys() & {"runtimeClassName", "nodeSelector", "tolerations"}


def test_the_engine_has_shared_memory(gpu: list[Object], default: list[Object]) -> None:
    for objects in (gpu, default):
        found = {name: volumes(pod).get("/dev/shm") for name, pod in pods(objects).items()}
        shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
        assert found == {"kvmanager": None, "engine": shm, "gateway": None}


# Metrics


def test_one_service_monitor_selects_the_metrics_of_all_three_services(gpu: list[Object]) -> None:
    spec = only(gpu, "ServiceMonitor")["spec"]
    assert spec["endpoints"] == [{"port": "metrics", "interval": "30s", "scrapeTimeout": "10s"}]
    selected = [
        item["metadata"]["name"]
        for objects in (gpu, render(release="green"))
        for item in of_kind(objects, "Service")
        if spec["selector"]["matchLabels"].items() <= item["metadata"]["labels"].items()
    ]
    assert sorted(selected) == [f"blue-quire-{name}" for name in sorted(TYPES)]


def test_the_dashboards_are_in_a_config_map_that_grafana_finds(gpu: list[Object]) -> None:
    config_map = only(gpu, "ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert DASHBOARDS
    assert {name: json.loads(text) for name, text in config_map["data"].items()} == {
        path.name: json.loads(path.read_text()) for path in DASHBOARDS
    }


# Pinned prompts


def test_prompts_to_pin_are_a_file_that_the_gateway_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts = [
        {"name": "a", "text": 'it\'s: "brief"\n# {{ x }}'},
        {"name": "b", "token_ids": [1000000, 2], "salt": "s"},
    ]
    objects = render({"gateway": {"pinnedPrompts": prompts}})
    ((name, text),) = only(objects, "ConfigMap")["data"].items()
    assert [json.loads(line) for line in text.splitlines()] == prompts
    (tmp_path / name).write_text(text)
    assert [prompt.name for prompt in read(str(tmp_path / name))] == ["a", "b"]
    settings, _ = parse("gateway", variables(containers(objects)["gateway"]), monkeypatch)
    assert settings.pinned_prompts == f"/etc/quire/{name}"
    mounted = volumes(pods(objects)["gateway"])["/etc/quire"]
    assert mounted["configMap"] == {"name": only(objects, "ConfigMap")["metadata"]["name"]}


# API keys


def test_a_secret_of_api_keys_is_a_file_that_the_gateway_reads_and_else_it_is_told_to_be_open(
    default: list[Object], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = render({"gateway": {"apiKeys": {"existingSecret": "keys"}}})
    secret = volumes(pods(objects)["gateway"])["/etc/quire-keys"]["secret"]
    assert secret == {"secretName": "keys", "defaultMode": 0o440}
    settings, _ = parse("gateway", variables(containers(objects)["gateway"]), monkeypatch)
    assert (settings.api_keys, settings.insecure) == ("/etc/quire-keys/api_keys.toml", False)
    settings.check_exposure()
    settings, _ = parse("gateway", variables(containers(default)["gateway"]), monkeypatch)
    assert (settings.api_keys, settings.insecure) == ("", True)
    assert "/etc/quire-keys" not in volumes(pods(default)["gateway"])


@pytest.mark.parametrize("component", TYPES)
def test_no_service_refuses_to_listen_to_the_network_of_the_pods(
    component: str, default: list[Object], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = parse(component, variables(containers(default)[component]), monkeypatch)
    settings.check_exposure()


# Notes


@pytest.mark.parametrize("monitored", [True, False])
def test_the_notes_say_how_to_call_the_gateway_and_warn(monitored: bool) -> None:
    values = nested("metrics.serviceMonitor.enabled", monitored)
    done = helm("install", "blue", str(CHART), "--dry-run=client", "--namespace", "llm", values=values)
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "WARNING: nobody is asked for an API key, and nothing is encrypted" in notes
    assert "kubectl --namespace llm port-forward service/blue-quire-gateway 50051\n" in notes
    assert 'quire generate --chat "Why is the sky blue?"\n' in notes
    assert "gateway 9151, engine 9152, kvmanager 9153" in notes
    assert ("metrics.serviceMonitor.enabled=true" in notes) is not monitored


def test_the_notes_say_that_clients_need_a_key() -> None:
    values = nested("gateway.apiKeys.existingSecret", "keys")
    done = helm("install", "blue", str(CHART), "--dry-run=client", "--namespace", "llm", values=values)
    notes = done.stdout.partition("NOTES:")[2]
    assert "Clients need an API key of the Secret keys" in notes
    assert 'QUIRE_API_KEY=... quire generate --chat "Why is the sky blue?"\n' in notes
