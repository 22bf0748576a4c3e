"""Writes the generated files of the chart: schema, README, rules, and the JSON that its templates read.

Also sets the version of `pyproject.toml` in Chart.yaml and in the values of ci/, and writes the variables that docker
compose passes on, because both deployments pass the same settings.

`--check` writes nothing and exits with 1 if a file is stale.
"""

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chart_readme import readme_of
from chart_schema import SETTINGS, fractions, ports, requirements, schema_of
from chart_values import values_of
from compose_variables import variables_of

from deploy.prometheus.rules import chart_rules

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "quire"
COMPOSE = ROOT / "deploy" / "compose" / "settings"

VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# Of the chart, of the application in it, of a tag of the image, and of the image.
_VERSIONED = re.compile(r'^(\s*(?:version: |appVersion: "|tag: "?|image: quire:))\d+\.\d+\.\d+', re.MULTILINE)


def main() -> None:
    """Write the files, or report stale ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing.")
    check = parser.parse_args().check
    files = generated()
    unwanted = [path for path in (CHART / "rules").glob("*") if path not in files]
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text] + unwanted
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"the chart is stale ({names}): run make chart")
    for path in stale:
        if path in files:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path])
        else:
            path.unlink()


def generated() -> dict[Path, str]:
    """Return the text of each generated file."""
    values = values_of((CHART / "values.yaml").read_text())
    versioned = [
        CHART / "Chart.yaml",
        *sorted((CHART / "ci").glob("*.yaml")),
        *sorted((CHART / "presets").glob("*.yaml")),
    ]
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    schema = schema_of(values)
    return {
        **{path: _VERSIONED.sub(rf"\g<1>{VERSION}", path.read_text()) for path in versioned},
        CHART / "values.schema.json": json.dumps(schema, indent=2) + "\n",
        CHART / "fractions.json": json.dumps(fractions(schema), indent=2) + "\n",
        CHART / "ports.json": json.dumps(ports(), indent=2) + "\n",
        CHART / "requirements.json": json.dumps(requirements(), indent=2) + "\n",
        CHART / "README.md": readme_of(about, values),
        **{COMPOSE / f"{service}.env": variables_of(service, settings) for service, settings in SETTINGS.items()},
        **{CHART / "rules" / name: text for name, text in chart_rules().items()},
    }


if __name__ == "__main__":
    main()
