"""Renders of the files in ci/ are valid for helm, Kubernetes and the schemas of other kinds."""

import functools
import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest
from kubernetes_validate import utils as kubernetes

from tests.deployment.helm import golden
from tests.deployment.helm.chart import (
    ABOUT,
    CHART,
    CI_VALUES,
    ROOT,
    TYPES,
    Object,
    all_containers,
    all_pods,
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
KUBERNETES = [
    version
    for version in kubernetes.all_versions()
    if [int(part) for part in version.split(".")] >= [int(part) for part in OLDEST_ALLOWED.split(".")]
]


@pytest.mark.parametrize("name", CI_VALUES)
def test_the_chart_passes_lint(name: str) -> None:
    done = helm("lint", "--strict", str(CHART), values=ci(name))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", [KUBERNETES[0], KUBERNETES[-1]])
@pytest.mark.parametrize("name", CI_VALUES)
def test_every_object_is_valid_on_the_oldest_and_the_newest_kubernetes(name: str, version: str) -> None:
    objects = render_ci(name, "--kube-version", version)
    assert len(objects) >= 2 * len(TYPES)
    for item in objects:
        assert_valid(json.dumps(item), version)


@functools.cache  # several files render the same objects
def assert_valid(text: str, version: str) -> None:
    item = json.loads(text)
    if item["kind"] in OTHER_KINDS:  # not a kind of Kubernetes
        jsonschema.validate(item, OTHER_KINDS[item["kind"]])
    else:
        checked = kubernetes.validate(item, version, strict=True)
        assert checked == kubernetes.major_minor(version)


@pytest.mark.parametrize("name", CI_VALUES)
def test_renders_equal_the_golden_files(name: str) -> None:
    assert golden.golden(name) == (golden.FOLDER / f"{name}.yaml").read_text(), (
        "after an intended change run make helm-golden"
    )


def test_no_golden_file_is_stale() -> None:
    assert {path.stem for path in golden.FOLDER.iterdir()} == CI_VALUES.keys()


def test_every_kind_of_the_chart_is_rendered_for_one_of_the_files() -> None:
    sources = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*.yaml"))
    sources += "\n".join(path.read_text() for path in (CHART / "templates").rglob("*.tpl"))
    made = {item["kind"] for name in CI_VALUES for item in render_ci(name)}
    assert set(re.findall(r"^kind: (\w+)$", sources, re.MULTILINE)) == made


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
    objects = render(merged(ci("gpu"), values), release=release)
    (engine,) = [item for item in of_kind(objects, "Deployment") if component_of(item) == "engine"]
    assert engine["metadata"]["name"] == name
    names = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(names) == len(set(names))
    common = name.removesuffix("-engine")
    assert [one for _, one in names if len(one) > 63 or not one.startswith(common)] == []


def test_names_of_models_fit_with_long_release_names() -> None:
    models = [{"name": "m" * 20, "model": "org/a"}, {"name": "n", "model": "org/b"}]
    objects = render({"models": models}, release="r" * 53)
    names = [item["metadata"]["name"] for item in of_kind(objects, "Deployment") if component_of(item) == "engine"]
    assert names == ["r" * 35 + "-engine-" + "m" * 20, "r" * 53 + "-engine-n"]


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
            pod["metadata"]["labels"] for pod in pods(own).values() if component_of(pod) == component_of(service)
        ]
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
