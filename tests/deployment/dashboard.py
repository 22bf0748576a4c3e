"""The panels of the dashboards as Grafana would read them, and their queries as Prometheus would get them."""

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
# Grafana's variables, and what stands for all of each.
VARIABLES = {"$model_name": ".*", "$engine": ".*", "$tenant": ".*"}
# What has no series until something has failed, and what has none unless it is configured or clients do certain things.
AFTER_FAULTS = ("quire_failovers_total", "quire_slow_clients_total")
ON_DEMAND = (
    *('tier="host"', "quire_tenant_rejections_total", "quire_admission_rejections_total"),
    *("quire_deadline_exceeded_total", "quire_cancel_to_free_seconds", "quire_http_requests_total"),
)


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    panel: str
    expression: str
    legend: str

    def executable(self, rate_interval: str = "4s") -> str:
        """Put into the place of Grafana's variables all there is, and a time of several scrapes."""
        expression = self.expression
        for variable, value in (*VARIABLES.items(), ("$__rate_interval", rate_interval)):
            expression = expression.replace(variable, value)
        assert "$" not in expression, f"{expression} has a variable that is not known here"
        return expression

    def legend_of(self, labels: dict[str, str]) -> str:
        legend = self.legend
        for label, value in labels.items():
            legend = legend.replace(f"{{{{{label}}}}}", value)
        return legend

    def needs(self, *metrics: str) -> bool:
        """Whether it asks for one of these."""
        return any(metric in self.expression for metric in metrics)


@dataclass(frozen=True)
class Panel:
    """What is drawn together. `colors` are those of its series by the word that their legends end with."""

    title: str
    kind: str
    unit: str
    most: float | None
    stacked: bool
    colors: dict[str, str]
    queries: tuple[Query, ...]


@dataclass(frozen=True)
class Dashboard:
    """One dashboard: its panels by the headings they stand under, all in order."""

    title: str
    uid: str
    variables: tuple[str, ...]
    rows: dict[str, tuple[Panel, ...]]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in order."""
        return tuple(panel for panels in self.rows.values() for panel in panels)


def dashboards() -> list[Dashboard]:
    """All dashboards."""
    return [_dashboard(json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))]


def queries() -> list[Query]:
    """All queries of all panels of all dashboards."""
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
