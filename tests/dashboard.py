"""The panels of the dashboard as Grafana would read them, and their queries as Prometheus would get them."""

import json
from dataclasses import dataclass
from pathlib import Path

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "dashboards" / "block-utilization.json"


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    panel: str
    expression: str
    legend: str

    def executable(self, rate_interval: str = "4s") -> str:
        """Put into the place of Grafana's variables all models, all engines, and a time of several scrapes."""
        expression = self.expression
        for variable, value in (("$model_name", ".*"), ("$engine", ".*"), ("$__rate_interval", rate_interval)):
            expression = expression.replace(variable, value)
        assert "$" not in expression, f"{expression} has a variable that is not known here"
        return expression

    def legend_of(self, labels: dict[str, str]) -> str:
        legend = self.legend
        for label, value in labels.items():
            legend = legend.replace(f"{{{{{label}}}}}", value)
        return legend


@dataclass(frozen=True)
class Panel:
    """What is drawn together."""

    title: str
    unit: str
    most: float | None
    stacked: bool
    queries: tuple[Query, ...]


def panels() -> list[Panel]:
    """All panels, in order."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        defaults = panel["fieldConfig"]["defaults"]
        found.append(
            Panel(
                panel["title"],
                defaults["unit"],
                defaults.get("max"),
                "stacking" in defaults["custom"],
                tuple(Query(panel["title"], target["expr"], target["legendFormat"]) for target in panel["targets"]),
            )
        )
    return found


def queries() -> list[Query]:
    """All queries of all panels."""
    return [query for panel in panels() for query in panel.queries]
