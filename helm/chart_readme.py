"""README.md of the chart, generated from the comments of values.yaml and the services' settings."""

import dataclasses
import json
from typing import Any

from chart_schema import OF_THE_CHART, SETTINGS
from chart_values import Value

from deploy.prometheus.thresholds import THRESHOLDS

_BEGINNING = """\
# {name}

{description}

```sh
helm install quire helm/quire --set image.repository=example.org/quire
helm test quire
```

Needs Kubernetes {kube_version}. `docs/deploy.md` describes how its parts work together; `presets/` has values for
production, on CPUs and on GPUs, and `ci/` for several models, TLS, autoscaling and so on. Each is rendered and checked
for all versions of Kubernetes. This file is generated from the comments of `values.yaml` and from the services'
settings: `make chart`.

## Values
"""

_SETTINGS = """\
## Settings of `{component}`

Given as `{component}.settings.NAME`.
"""

_THRESHOLDS = """\
## Thresholds of the alerts

Given as `metrics.prometheusRule.thresholds.NAME`, in place of those of `metrics.prometheusRule.preset`. Times are in
seconds, and the two of tokens are bounds of their histograms' buckets.

| name | cpu | gpu | meaning |
|---|---|---|---|
"""


def readme_of(about: dict[str, Any], values: list[Value]) -> str:
    """Return the text of README.md."""
    beginning = _BEGINNING.format(
        name=about["name"], description=about["description"], kube_version=about["kubeVersion"].removesuffix("-0")
    )
    rows = [(value.name, _shown(value.default), value.meaning) for value in values if not value.section]
    parts = [beginning, _table(rows)]
    for component, settings_type in SETTINGS.items():
        fields = [field for field in dataclasses.fields(settings_type) if field.name not in OF_THE_CHART]
        parts.append(_SETTINGS.format(component=component))
        parts.append(_table([(field.name, _shown(field.default), _meaning(field)) for field in fields]))
    parts.append(_thresholds())
    return "\n".join(parts)


def _thresholds() -> str:
    rows = [f"| `{one.name}` | {one.cpu:g} | {one.gpu:g} | {one.meaning} |\n" for one in THRESHOLDS]
    return _THRESHOLDS + "".join(rows)


def _meaning(field: "dataclasses.Field[Any]") -> str:
    choices = field.metadata["choices"]
    return f"{field.metadata['meaning']} One of {', '.join(choices)}." if choices else field.metadata["meaning"]


def _shown(default: Any) -> str:
    return json.dumps(default)


def _table(rows: list[tuple[str, str, str]]) -> str:
    lines = [f"| `{name}` | `{default}` | {_cell(meaning)} |" for name, default, meaning in rows]
    return "\n".join(["| name | default | meaning |", "|---|---|---|", *lines, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
