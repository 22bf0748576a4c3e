"""Arguments, variables, ports and probes of the containers fit the `quire` command."""

import dataclasses
import math
from typing import Any

import pytest

from services.cli.main import cli
from services.runtime.ports import ENGINE, KVMANAGER
from tests.deployment.helm.chart import (
    CI_VALUES,
    HEALTH,
    PORTS,
    SCHEMA,
    TYPES,
    all_containers,
    all_pods,
    by_name,
    component_of,
    containers,
    main_container,
    of_kind,
    parse,
    pods,
    render,
    render_ci,
    settings_of,
    variables,
)
from tests.services.runtime.test_settings import required_by


@pytest.mark.parametrize("name", CI_VALUES)
def test_the_command_of_every_container_parses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = 0
    for pod in all_pods(render_ci(name)).values():
        for container in all_containers(pod):
            if container["image"].startswith("quire:"):
                assert "command" not in container, "the image's entry point is `quire`"
                parse(container["args"], variables(container), monkeypatch)
                commands += 1
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if "exec" in container.get(probe, {}):
                    program, *arguments = container[probe]["exec"]["command"]
                    assert program == "quire"
                    assert parse(arguments, {}, monkeypatch)[0] == "health"
    assert commands >= 4


@pytest.mark.parametrize("name", CI_VALUES)
def test_every_service_accepts_its_settings_and_listens_on_the_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pod in pods(render_ci(name)).values():
        settings_of(pod, monkeypatch).check_exposure()


@pytest.mark.parametrize("name", CI_VALUES)
def test_the_command_reads_every_variable_that_the_chart_sets(name: str) -> None:
    for pod in pods(render_ci(name)).values():
        component = component_of(pod)
        read = {f"QUIRE_{component}_{option.name}".upper() for option in cli.commands[component].params}
        read.add("HF_TOKEN")  # from the values
        assert {variable["name"] for variable in main_container(pod)["env"]} - read == set()


def another_value(field: "dataclasses.Field[Any]") -> Any:
    """Return another value than the default; for a number a large one, which Helm can write as 1e+06."""
    if field.metadata["choices"]:
        return next(choice for choice in reversed(field.metadata["choices"]) if choice != field.default)
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, str):
        return 'it\'s: "something" else'
    return type(field.default)(field.metadata["most"] or 2_000_000)


def values_of_all(component: str) -> list[dict[str, Any]]:
    """Return values of all settings: those that require nothing together, each other one with what it requires."""
    names = SCHEMA["properties"][component]["properties"]["settings"]["properties"]
    fields = [field for field in dataclasses.fields(TYPES[component]) if field.name in names]
    together = {field.name: another_value(field) for field in fields if not field.metadata["requires"]}
    requiring = [field for field in fields if field.metadata["requires"]]
    return [together, *({one.name: another_value(one), **required_by(one, TYPES[component])} for one in requiring)]


@pytest.mark.parametrize("component", TYPES)
def test_every_setting_reaches_its_service(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = {"kvmanager": {"settings": {"grace_seconds": 3_000_000}}}
    open_gpu = {"resources": {"limits": {"nvidia.com/gpu": 64}}, "kvEvents": {"insecure": True}}
    beside = open_gpu if component == "engine" else {}
    for given in values_of_all(component):
        rendered = render({**longest, component: {"settings": given, **beside}})
        _, options = parse([component], variables(containers(rendered)[component]), monkeypatch)
        assert {name: options[name] for name in given} == given


@pytest.mark.parametrize("component", TYPES)
def test_a_fraction_of_the_command_line_reaches_its_service(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = SCHEMA["properties"][component]["properties"]["settings"]["properties"]
    fields = [field for field in dataclasses.fields(TYPES[component]) if field.name in names]
    given = {
        one.name: min(one.metadata["most"] or 99, 99) / 4 + 0.125 for one in fields if isinstance(one.default, float)
    }
    gpu = {"engine": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}
    options = [f"--set={component}.settings.{name}={value}" for name, value in given.items()]
    rendered = render(gpu, "--set=engine.settings.grace_seconds=1.5", *options)
    _, found = parse([component], variables(containers(rendered)[component]), monkeypatch)
    assert {name: found[name] for name in given} == given
    assert given


def test_a_setting_of_zero_reaches_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render({"engine": {"settings": {"grace_seconds": 0, "seconds_without_kvmanager": 0}}})
    settings = settings_of(pods(rendered)["engine"], monkeypatch)
    assert (settings.grace_seconds, settings.seconds_without_kvmanager) == (0, 0)


def test_an_argument_wins_over_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render({"engine": {"settings": {"block_size": 8}, "extraArgs": ["--block-size=32"]}})
    assert settings_of(pods(rendered)["engine"], monkeypatch).block_size == 32


@pytest.mark.parametrize("component", TYPES)
def test_a_service_listens_on_the_address_of_its_pod(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    container = containers(render())[component]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == PORTS[component]
    _, options = parse(container["args"], variables(container), monkeypatch)
    assert options["listen"] == f"0.0.0.0:{ports['grpc']}"
    assert options["metrics_listen"] == f"0.0.0.0:{ports['metrics']}"
    if component == "gateway":
        assert options["http_listen"] == f"0.0.0.0:{ports['http']}"


def test_the_block_map_listens_on_the_network_only_if_it_is_opened() -> None:
    name = "QUIRE_KVMANAGER_MAP_LISTEN"
    assert name not in variables(containers(render())["kvmanager"])
    rendered = render({"kvmanager": {"map": {"open": True}}})
    assert variables(containers(rendered)["kvmanager"])[name] == f"0.0.0.0:{KVMANAGER.http}"
    assert {"name": "map", "containerPort": KVMANAGER.http} in containers(rendered)["kvmanager"]["ports"]
    ports = by_name(rendered, "Service")["kvmanager"]["spec"]["ports"]
    assert {"name": "map", "port": KVMANAGER.http, "targetPort": "map"} in ports


@pytest.mark.parametrize("component", TYPES)
def test_the_ports_of_a_service_target_those_of_its_pods(component: str) -> None:
    service = by_name(render(), "Service")[component]["spec"]
    assert service["type"] == "ClusterIP"
    ports = {port["name"]: (port["port"], port["targetPort"]) for port in service["ports"]}
    assert ports == {name: (port, name) for name, port in PORTS[component].items()}


@pytest.mark.parametrize("name", CI_VALUES)
def test_the_services_find_each_other_and_the_gateway_every_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render_ci(name)
    services = by_name(rendered, "Service")
    gateway = settings_of(pods(rendered)["gateway"], monkeypatch)
    groups = [one["spec"]["leaderWorkerTemplate"]["leaderTemplate"] for one in of_kind(rendered, "LeaderWorkerSet")]
    managers = set()
    for pod in [*groups, *(pod for pod in pods(rendered).values() if component_of(pod) == "engine")]:
        assert services["engine"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        address = variables(main_container(pod))["QUIRE_ENGINE_KVMANAGER"]
        if address == f"127.0.0.1:{KVMANAGER.grpc}":
            assert "kvmanager" in {one["name"] for one in pod["spec"]["containers"]}
            assert services["kvmanager"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
            assert services["kvmanager"]["spec"]["clusterIP"] == "None", "the name must resolve to all pods"
            address = f"dns:blue-quire-kvmanager:{KVMANAGER.grpc}"
        managers.add(address)
    suffix = f":{KVMANAGER.grpc}"
    found = {address.removeprefix("dns:").removeprefix("blue-quire-").removesuffix(suffix) for address in managers}
    assert {component_of(services[name]) for name in found} == {"kvmanager"}
    assert set(gateway.kvmanager.split(",")) == managers
    assert gateway.engines == f"dns:blue-quire-engine:{ENGINE.grpc}"
    assert services["engine"]["spec"]["clusterIP"] == "None", "the name must resolve to all pods"


def test_every_engines_id_is_the_name_of_its_pod() -> None:
    engines = [main_container(pod) for pod in pods(render_ci("models")).values() if component_of(pod) == "engine"]
    assert len(engines) == 2
    for container in engines:
        (variable,) = [one for one in container["env"] if one["name"] == "QUIRE_ENGINE_ENGINE_ID"]
        assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


def test_service_links_are_disabled() -> None:
    assert {pod["spec"]["enableServiceLinks"] for pod in all_pods(render()).values()} == {False}


# Start and end


@pytest.mark.parametrize("component", TYPES)
def test_readiness_checks_the_service_and_liveness_the_process(component: str) -> None:
    container = containers(render())[component]
    port = PORTS[component]["grpc"]
    assert container["startupProbe"]["grpc"] == container["livenessProbe"]["grpc"] == {"port": port}
    assert container["readinessProbe"]["grpc"] == {"port": port, "service": HEALTH[component]}
    periods = [container[f"{probe}Probe"]["periodSeconds"] for probe in ("startup", "liveness", "readiness")]
    assert periods == [10, 10, 5]
    assert container["livenessProbe"]["failureThreshold"] == 3


def test_startup_probes_allow_half_an_hour_for_a_model() -> None:
    probe = containers(render())["engine"]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 1800


@pytest.mark.parametrize("component", TYPES)
def test_a_rollout_waits_longer_than_a_container_may_take_to_start(component: str) -> None:
    rendered = render({component: {"startupFailureThreshold": 1000}})
    assert containers(rendered)[component]["startupProbe"]["failureThreshold"] == 1000
    assert by_name(rendered, "Deployment")[component]["spec"]["progressDeadlineSeconds"] > 10 * 1000


@pytest.mark.parametrize("component", TYPES)
@pytest.mark.parametrize("grace_seconds", [None, 0, 0.5, 120, 7200.25])
def test_the_termination_grace_period_is_longer_than_a_drain(component: str, grace_seconds: float | None) -> None:
    given = {"kvmanager": {"settings": {"grace_seconds": 9000}}, "engine": {"settings": {"grace_seconds": 0}}}
    if grace_seconds is not None:
        given[component] = {"settings": {"grace_seconds": grace_seconds}}
    if component == "kvmanager" and grace_seconds in (None, 0):
        given["kvmanager"] = {"settings": {"grace_seconds": 0.25}}
    drain = given.get(component, {"settings": {"grace_seconds": 30}})["settings"]["grace_seconds"]
    before = 5 if component == "gateway" else 0
    pod = pods(render(given))[component]
    assert pod["spec"]["terminationGracePeriodSeconds"] == before + math.ceil(drain) + 15


@pytest.mark.parametrize(("version", "action"), [("1.29.0", "exec"), ("1.30.0", "sleep"), ("1.34.2", "sleep")])
def test_a_gateway_serves_until_it_is_removed_from_the_service(version: str, action: str) -> None:
    rendered = containers(render({"gateway": {"preStopSeconds": 7}}, "--kube-version", version))
    expected = {"sleep": {"seconds": 7}, "exec": {"command": ["sleep", "7"]}}
    assert rendered["gateway"]["lifecycle"] == {"preStop": {action: expected[action]}}
    # An engine notifies its gateways, and a KV manager waits for its engines.
    assert [name for name, container in rendered.items() if "lifecycle" in container] == ["gateway"]


def test_without_a_drain_delay_there_is_no_hook() -> None:
    assert "lifecycle" not in containers(render({"gateway": {"preStopSeconds": 0}}))["gateway"]


def test_a_longer_termination_grace_period_can_be_set() -> None:
    pod = pods(render({"engine": {"terminationGracePeriodSeconds": 31}}))["engine"]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 31


def test_a_rollout_removes_engines_before_it_adds_any_and_adds_gateways_first() -> None:
    strategies = {name: item["spec"]["strategy"] for name, item in by_name(render(), "Deployment").items()}
    assert strategies == {
        "kvmanager": {"type": "Recreate"},
        "engine": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        "gateway": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
    }
