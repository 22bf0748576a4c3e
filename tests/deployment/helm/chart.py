"""Renders the chart with helm, and finds objects in the result."""

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.main import cli
from services.cli.options import settings_from
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KVManagerSettings
from services.runtime.ports import ENGINE, GATEWAY, KVMANAGER

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm" / "quire"
HELM = os.environ.get("HELM") or shutil.which("helm")

ABOUT = yaml.safe_load((CHART / "Chart.yaml").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
PRODUCTION, ON_GPUS = (CHART / "presets" / f"{name}-values.yaml" for name in ("production", "gpu"))
# The files of values that are rendered together, by name.
CI_VALUES = {
    **{path.name.removesuffix("-values.yaml"): (path,) for path in sorted((CHART / "ci").glob("*-values.yaml"))},
    "production": (PRODUCTION,),
    "production-gpu": (PRODUCTION, ON_GPUS),
}

TYPES: dict[str, type[Any]] = {"kvmanager": KVManagerSettings, "engine": EngineSettings, "gateway": GatewaySettings}
PORTS = {
    "kvmanager": {"grpc": KVMANAGER.grpc, "metrics": KVMANAGER.metrics},
    "engine": {"grpc": ENGINE.grpc, "metrics": ENGINE.metrics},
    "gateway": {"grpc": GATEWAY.grpc, "http": GATEWAY.http, "metrics": GATEWAY.metrics},
}
HEALTH = {"kvmanager": "quire.v1.KVManager", "engine": "quire.v1.Engine", "gateway": "quire.v1.Gateway"}

Object = dict[str, Any]

MUTUAL_TLS: Object = {"tls": {"enabled": True, "existingSecrets": {"kvmanager": "k", "engine": "e", "gateway": "g"}}}

# libyaml's loader if available, because renders are many and long.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def helm(*arguments: str, values: Object | None = None) -> "subprocess.CompletedProcess[str]":
    if not HELM:
        pytest.skip("helm is not installed: put it on the PATH, or set the variable HELM")
    command = [HELM, *arguments, "--values", "-"]
    return subprocess.run(command, input=json.dumps(values or {}), text=True, capture_output=True, check=False)


def render(values: Object | None = None, *arguments: str, release: str = "blue") -> list[Object]:
    return _rendered(json.dumps(values or {}), arguments, release)


def render_ci(name: str, *arguments: str) -> list[Object]:
    return render(ci(name), *arguments)


def ci(name: str) -> Object:
    return merged(*(yaml.safe_load(path.read_text()) or {} for path in CI_VALUES[name]))


# Many tests use the same renders, and none changes them.
@functools.cache
def _rendered(values: str, arguments: tuple[str, ...], release: str) -> list[Object]:
    done = helm("template", release, str(CHART), "--namespace", "llm", *arguments, values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.load_all(done.stdout, _LOADER) if item]


def refusal(values: Object) -> str:
    """Return helm's message for values that it must refuse."""
    done = helm("template", "blue", str(CHART), values=values)
    assert done.returncode != 0, "these values were rendered"
    return done.stderr


def merged(*several: Object) -> Object:
    """Merge values as Helm merges files of values."""
    result: Object = {}
    for values in several:
        for key, value in values.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def nested(path: str, value: Any) -> Object:
    for key in reversed(path.split(".")):
        value = {key: value}
    result: Object = value
    return result


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def only(objects: list[Object], kind: str) -> Object:
    (found,) = of_kind(objects, kind)
    return found


def component_of(item: Object) -> str:
    component: str = item["metadata"]["labels"]["app.kubernetes.io/component"]
    return component


def by_name(objects: list[Object], kind: str) -> dict[str, Object]:
    found = {item["metadata"]["name"].removeprefix("blue-quire-"): item for item in of_kind(objects, kind)}
    assert len(found) == len(of_kind(objects, kind))
    return found


def deployments(objects: list[Object]) -> dict[str, Object]:
    """Return the Deployments by name, without the release's prefix."""
    return by_name(objects, "Deployment")


def pods(objects: list[Object]) -> dict[str, Object]:
    return {name: item["spec"]["template"] for name, item in deployments(objects).items()}


def main_container(pod: Object) -> Object:
    return service_container(pod, component_of(pod))


def service_container(pod: Object, component: str) -> Object:
    """Return the container of a service, which may be beside another one."""
    (found,) = [one for one in pod["spec"]["containers"] if one["name"] == component]
    container: Object = found
    return container


def pod_of(objects: list[Object], component: str) -> Object:
    """Return the first pod with a container of the service."""
    return next(
        pod for pod in pods(objects).values() if component in {one["name"] for one in pod["spec"]["containers"]}
    )


def containers(objects: list[Object]) -> dict[str, Object]:
    return {name: main_container(pod) for name, pod in pods(objects).items()}


def all_pods(objects: list[Object]) -> dict[str, Object]:
    """Return all pods and pod templates, including those of hooks."""
    jobs = {name: item["spec"]["template"] for name, item in by_name(objects, "Job").items()}
    return {**pods(objects), **by_name(objects, "Pod"), **jobs}


def all_containers(pod: Object) -> Iterator[Object]:
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def variables(container: Object) -> dict[str, str]:
    """Return the container's variables with a value, after a check that names are unique."""
    names = [variable["name"] for variable in container.get("env", [])]
    assert len(names) == len(set(names))
    return {variable["name"]: variable["value"] for variable in container.get("env", []) if "value" in variable}


def volumes(pod: Object) -> dict[str, Object]:
    """Return the volumes of the main container by mount path, after a check that all are mounted."""
    named = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert named.keys() == {mount["name"] for one in pod["spec"]["containers"] for mount in one["volumeMounts"]}
    return {mount["mountPath"]: named[mount["name"]] for mount in main_container(pod)["volumeMounts"]}


def parse(
    arguments: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, dict[str, Any]]:
    """Return the subcommand and options of `quire` for arguments and an environment. Raises click's errors."""
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    name, *rest = arguments
    with (
        cli.make_context("quire", list(arguments), auto_envvar_prefix="QUIRE") as group,
        cli.commands[name].make_context(name, rest, parent=group) as context,
    ):
        return name, context.params


def settings_of(pod: Object, monkeypatch: pytest.MonkeyPatch, component: str = "") -> Any:
    """Return the settings of a pod's service, by default its own. Raises click's errors."""
    container = service_container(pod, component or component_of(pod))
    component, options = parse(container["args"], variables(container), monkeypatch)
    return settings_from(TYPES[component], options)


def settings_in(pod: Object, component: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the settings of a service, with the pod's name in place of the engine's id."""
    container = service_container(pod, component)
    expanded = {
        name: value.replace("$(QUIRE_ENGINE_ENGINE_ID)", "pod-1") for name, value in variables(container).items()
    }
    service, options = parse(container["args"], expanded, monkeypatch)
    return settings_from(TYPES[service], options)


def engine_pod(values: Object) -> Object:
    """Return the pod of a release's only engine."""
    return pods(render(values))["engine"]


def selected_by(objects: list[Object], labels: dict[str, str]) -> list[str]:
    """Return the names of the pods with these labels."""
    return [name for name, pod in pods(objects).items() if labels.items() <= pod["metadata"]["labels"].items()]
