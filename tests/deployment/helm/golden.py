"""Expected renders of some files in ci/, in golden/, which show a change of the chart as a diff.

What each value changes is asserted by tests. `make helm-golden` rewrites them.
"""

from pathlib import Path

import yaml

from tests.deployment.helm.chart import Object, render_ci

FOLDER = Path(__file__).parent / "golden"
NAMES = ("default", "managers", "tls", "two-pods")
KUBERNETES = "1.34.0"


def golden(name: str) -> str:
    """Return the render of a file in ci/, without copies of other files."""
    objects = [_without_copies(item) for item in render_ci(name, "--kube-version", KUBERNETES)]
    return yaml.safe_dump_all(objects, sort_keys=True, width=120)


def _without_copies(item: Object) -> Object:
    if item["kind"] == "PrometheusRule":
        return {**item, "spec": {"groups": "those of rules/"}}
    if item["kind"] == "ConfigMap" and item["metadata"]["name"] == "quire-dashboards":
        return {**item, "data": "the files of dashboards/"}
    return item


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.yaml"):
        path.unlink()
    for name in NAMES:
        (FOLDER / f"{name}.yaml").write_text(golden(name))


if __name__ == "__main__":
    write()
