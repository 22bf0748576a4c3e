"""Panels of the dashboards as read by Grafana, and their queries as sent to Prometheus."""

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "helm" / "quire" / "dashboards"
# Grafana's variables, each with a pattern for all its values.
VARIABLES = {"$namespace": ".*", "$release": ".*", "$model_name": ".*", "$engine": ".*", "$tenant": ".*"}
# Metrics without series before a failure, and those that need a setting or certain requests.
ON_DEMAND = (
    *('tier="host"', "quire_tenant_rejections_total", "quire_admission_rejections_total"),
    *("quire_deadline_exceeded_total", "quire_cancel_to_free_seconds", "quire_http_requests_total"),
    *("quire_spec_decode_num_draft_tokens_total", "quire_kv_events", "quire_smg", "quire_tool_call"),
    "quire_invalid_requests_total",
)


@dataclass(frozen=True)
class Query:
    panel: str
    expression: str
    legend: str

    def executable(self, rate_interval: str = "4s") -> str:
        """Replace Grafana's variables by patterns for all values, and the interval by that of several scrapes."""
        expression = self.expression
        for variable, value in (*VARIABLES.items(), ("$__rate_interval", rate_interval)):
            expression = expression.replace(variable, value)
        assert "$" not in expression, f"{expression} has an unknown variable"
        return expression

    def legend_of(self, labels: dict[str, str]) -> str:
        legend = self.legend
        for label, value in ({"namespace": "", "release": ""} | labels).items():  # Grafana shows absent ones as empty
            legend = legend.replace(f"{{{{{label}}}}}", value)
        return legend.strip()

    def needs(self, *metrics: str) -> bool:
        return any(metric in self.expression for metric in metrics)


@dataclass(frozen=True)
class Panel:
    """One panel. `colors` maps the last word of a legend to the colour of its series."""

    title: str
    kind: str
    unit: str
    maximum: float | None
    stacked: bool
    colors: dict[str, str]
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Dashboard:
    """One dashboard: its panels by the titles of their rows, in order."""

    title: str
    uid: str
    variables: tuple[str, ...]
    rows: dict[str, tuple[Panel, ...]]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for panels in self.rows.values() for panel in panels)


def dashboards() -> list[Dashboard]:
    return [_dashboard(json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))]


def queries() -> list[Query]:
    return [query for board in dashboards() for panel in board.panels for query in panel.queries]


def _dashboard(written: dict[str, object]) -> Dashboard:
    rows: dict[str, list[Panel]] = {}
    for panel in written["panels"]:  # type: ignore[attr-defined]
        if panel["type"] == "row":
            current = rows[panel["title"]] = []
        else:
            current.append(_panel(panel))
    variables = [one["name"] for one in written["templating"]["list"]]  # type: ignore[index]
    title, uid = str(written["title"]), str(written["uid"])
    return Dashboard(title, uid, tuple(variables), {row: tuple(panels) for row, panels in rows.items()})


def _panel(written: dict[str, object]) -> Panel:
    defaults = written["fieldConfig"]["defaults"]  # type: ignore[index]
    overrides = written["fieldConfig"].get("overrides", [])  # type: ignore[attr-defined]
    title = str(written["title"])
    return Panel(
        title,
        str(written["type"]),
        defaults["unit"],
        defaults.get("max"),
        "stacking" in defaults.get("custom", {}),
        {one["matcher"]["options"].strip("/ $"): one["properties"][0]["value"]["fixedColor"] for one in overrides},
        tuple(Query(title, target["expr"], target["legendFormat"]) for target in written["targets"]),  # type: ignore[attr-defined]
    )
