"""Renders of the files in ci/ are valid for helm, Kubernetes and the schemas of other kinds."""

import functools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from kubernetes_validate import utils as kubernetes

from tests.deployment.helm import golden
from tests.deployment.helm.chart import (
    ABOUT,
    CHART,
    CI_VALUES,
    ROOT,
    Object,
    all_containers,
    all_pods,
    by_name,
    ci,
    component_of,
    deployments,
    helm,
    merged,
    of_kind,
    pods,
    render,
    render_ci,
)

OTHER_KINDS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "schemas").glob("*.json")}
OLDEST_ALLOWED = re.fullmatch(r">=(\d+\.\d+)\.0-0", ABOUT["kubeVersion"])[1]
VERSION = ABOUT["appVersion"]


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


KUBERNETES = sorted(
    {one for one in kubernetes.all_versions() if numbers(one) >= numbers(OLDEST_ALLOWED)},
    key=numbers,
)
TEMPLATES = "\n".join(path.read_text() for path in sorted((CHART / "templates").rglob("*.[yt][ap][ml]*")))
# Versions at which templates decide between fields.
DECISIVE = [numbers(OLDEST_ALLOWED), *map(numbers, re.findall(r'semverCompare ">=([0-9.]+)-0"', TEMPLATES))]


@pytest.mark.parametrize("name", CI_VALUES)
def test_the_chart_passes_lint(name: str) -> None:
    done = helm("lint", "--strict", str(CHART), values=ci(name))
    assert done.returncode == 0, done.stdout + done.stderr


@functools.cache
def all_objects(version: str) -> list[Object]:
    """Return the objects of all files, rendered for the oldest Kubernetes that templates treat like this one."""
    like = max(one for one in DECISIVE if one <= numbers(version))
    whole = ".".join(map(str, [*like, 0]))
    return [item for name in CI_VALUES for item in render_ci(name, "--kube-version", whole)]


def shape(value: Any) -> str:
    """Return the fields and types of an object, which decide about its validity, as text."""
    if isinstance(value, dict):
        fields = {key: inner if key in ("apiVersion", "kind") else shape(inner) for key, inner in value.items()}
        return json.dumps(fields, sort_keys=True)
    if isinstance(value, list):
        return json.dumps(sorted({shape(one) for one in value}))
    return type(value).__name__


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_of_every_file_is_valid_on_every_kubernetes(version: str) -> None:
    of_kubernetes = [item for item in all_objects(version) if item["kind"] not in OTHER_KINDS]
    shapes = {shape(item): item for item in of_kubernetes}
    assert len(shapes) > len(CI_VALUES)
    for item in shapes.values():
        assert kubernetes.validate(item, version, strict=True) == kubernetes.major_minor(version)


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_objects_of_other_kinds_are_valid(kind: str) -> None:
    found = of_kind(all_objects(KUBERNETES[-1]), kind)
    assert found
    for item in found:
        jsonschema.validate(item, OTHER_KINDS[kind])


@pytest.mark.parametrize("name", golden.NAMES)
def test_renders_equal_the_golden_files(name: str) -> None:
    assert golden.golden(name) == (golden.FOLDER / f"{name}.yaml").read_text(), (
        "after an intended change run make helm-golden"
    )


def test_no_golden_file_is_stale() -> None:
    assert {path.stem for path in golden.FOLDER.iterdir()} == {*golden.NAMES}


def test_every_kind_of_the_chart_is_rendered_for_one_of_the_files() -> None:
    made = {item["kind"] for item in all_objects(KUBERNETES[-1])}
    assert set(re.findall(r"^kind: (\w+)$", TEMPLATES, re.MULTILINE)) == made


def test_a_kubernetes_without_grpc_probes_is_refused() -> None:
    assert OLDEST_ALLOWED == "1.27"
    done = helm("template", "blue", str(CHART), "--kube-version", "1.26.15")
    assert done.returncode != 0
    assert "requires kubeVersion: >=1.27.0-0" in done.stderr


def test_defaults_render_deployments_services_accounts_and_a_test() -> None:
    kinds = sorted(item["kind"] for item in render())
    assert kinds == sorted(["Deployment", "Service", "ServiceAccount"] * 3 + ["Pod"])


def test_the_charts_app_is_the_version_of_the_package() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert ABOUT["appVersion"] == package["project"]["version"]


# Names and labels


@pytest.mark.parametrize(
    ("release", "values", "common"),
    [
        ("blue", {}, "blue-quire"),
        ("my-quire", {}, "my-quire"),
        ("my.quire", {}, "my-quire"),
        ("3fold", {}, "quire-3fold"),
        ("blue", {"nameOverride": "llm"}, "blue-llm"),
        ("blue", {"fullnameOverride": "llm"}, "llm"),
        ("r" * 53, {}, "r" * 53),
        ("3" + "r" * 52, {}, "quire-3" + "r" * 37 + "-4e0e66f7"),
        ("blue", {"fullnameOverride": "f" * 60}, "f" * 53),
    ],
)
def test_objects_have_different_valid_names_after_the_release(release: str, values: Object, common: str) -> None:
    public = {"headlessService": {"enabled": True}, "service": {"type": "LoadBalancer"}, "insecure": True}
    objects = render(merged(ci("managers"), {"gateway": public}, values), release=release)
    names = [(item["kind"], item["metadata"]["name"]) for item in objects if item["kind"] != "PriorityClass"]
    assert len(names) == len(set(names))
    assert ("Service", f"{common}-gateway") in names
    for kind, name in names:
        assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name), "DNS-1035"
        assert len(name) <= 63 or kind not in ("Deployment", "Service", "Job")
        # Shortened ones end with a hash.
        assert name.startswith(f"{common}-" if len(name) < 46 else common[:37]), (kind, name)


def test_a_priority_class_is_named_after_namespace_and_release() -> None:
    (name,) = by_name(render_ci("managers"), "PriorityClass")
    assert name == "llm-blue-quire-kvmanager"
    pods_of_managers = [pod["spec"] for pod in pods(render_ci("managers")).values() if component_of(pod) == "kvmanager"]
    assert {spec["priorityClassName"] for spec in pods_of_managers} == {name}


def test_the_pods_of_long_names_of_models_are_told_apart() -> None:
    """Kubernetes cuts names of pods off after 46 characters of a Deployment's name."""
    models = [{"name": name, "model": f"org/{name}"} for name in ("m" * 63, "m" * 62 + "n", "short")]
    keda = {"keda": {"enabled": True, "prometheusAddress": "http://p"}}
    objects = render({"models": models, "engine": {"autoscaling": keda}})
    engines = [item["metadata"]["name"] for item in of_kind(objects, "Deployment") if component_of(item) == "engine"]
    assert engines == [
        "blue-quire-engine-mmmmmmmmmmmmmmmmmmm-de0b7b8c",
        "blue-quire-engine-mmmmmmmmmmmmmmmmmmm-123a6645",
        "blue-quire-engine-short",
    ]
    assert max(map(len, engines)) == 46
    for engine, scaled in zip(engines, of_kind(objects, "ScaledObject"), strict=True):
        pattern = re.findall('engine=~"([^"]*)"', json.dumps(scaled).replace("\\", ""))[0]
        matching = [one for one in engines if re.fullmatch(pattern, f"{one}-7d9c5b8f4c-x2x4v"[:63])]
        assert matching == [engine]


@pytest.mark.parametrize("name", CI_VALUES)
def test_every_object_has_the_standard_labels(name: str) -> None:
    expected = {
        "helm.sh/chart": f"quire-{ABOUT['version']}",
        "app.kubernetes.io/name": "quire",
        "app.kubernetes.io/instance": "blue",
        "app.kubernetes.io/version": ABOUT["appVersion"],
        "app.kubernetes.io/part-of": "quire",
        "app.kubernetes.io/managed-by": "Helm",
    }
    for item in render_ci(name):
        if item["metadata"]["name"] != "blue-extra":  # the user's own
            assert expected.items() <= item["metadata"]["labels"].items(), item["metadata"]["name"]


@pytest.mark.parametrize("name", CI_VALUES)
def test_each_workload_selects_its_own_pods_and_each_service_those_of_its_component(name: str) -> None:
    own = render_ci(name)
    other_release = render(ci(name), release="green")
    everywhere = [pod["metadata"]["labels"] for objects in (own, other_release) for pod in all_pods(objects).values()]
    for workload, deployment in deployments(own).items():
        selector = deployment["spec"]["selector"]["matchLabels"]
        selected = [labels for labels in everywhere if selector.items() <= labels.items()]
        assert selected == [pods(own)[workload]["metadata"]["labels"]]
    for service in of_kind(own, "Service"):
        selector = service["spec"]["selector"]
        selected = [labels for labels in everywhere if selector.items() <= labels.items()]
        of_component = [
            pod["metadata"]["labels"]
            for pod in pods(own).values()
            if component_of(service) in {one["name"] for one in pod["spec"]["containers"]}
            and component_of(pod) == selector["app.kubernetes.io/component"]
        ]
        if "quire-model" in selector:
            of_component = [one for one in of_component if one["quire-model"] == selector["quire-model"]]
        assert selected == of_component


@pytest.mark.parametrize("name", CI_VALUES)
def test_no_file_names_a_registry(name: str) -> None:
    images = {one["image"] for pod in all_pods(render_ci(name)).values() for one in all_containers(pod)}
    assert images <= {f"quire:{VERSION}", f"quire:{VERSION}-cuda", "busybox:1.36"}
    hosts = re.compile(
        r"docker\.(io|com)|ghcr\.io|quay\.io|gcr\.io|nvcr\.io|pkg\.dev|registry\.k8s\.io|azurecr|amazonaws|registry\."
    )
    files = [path for path in CHART.rglob("*") if path.is_file()]
    assert len(files) > 20
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
    found = [one["image"] for pod in all_pods(render({"image": image})).values() for one in all_containers(pod)]
    assert set(found) == {expected}
    assert len(found) == 5  # health and generation of `helm test` are two
