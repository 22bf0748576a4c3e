"""What the chart makes of each file in ci/, kept in golden/: a change of the chart shows there as a diff.

`make helm-golden` writes the files again.
"""

from pathlib import Path

import yaml

from tests.deployment.helm.chart import CI_VALUES, Object, render_ci

FOLDER = Path(__file__).parent / "golden"
KUBERNETES = "1.34.0"


def golden(name: str) -> str:
    """Return what the chart makes of one of the files, without what is copied from other files as it is."""
    objects = [_without_copies(item) for item in render_ci(name, "--kube-version", KUBERNETES)]
    return yaml.safe_dump_all(objects, sort_keys=True, width=120)


def _without_copies(item: Object) -> Object:
    if item["kind"] == "PrometheusRule":
        return {**item, "spec": {"groups": "those of rules/"}}
    if item["kind"] == "ConfigMap" and item["metadata"]["name"].endswith("-dashboard"):
        return {**item, "data": "the files of dashboards/"}
    return item


def write() -> None:
    """Write all files, and remove those of files in ci/ that there are no more."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.yaml"):
        path.unlink()
    for name in CI_VALUES:
        (FOLDER / f"{name}.yaml").write_text(golden(name))


if __name__ == "__main__":
    write()
