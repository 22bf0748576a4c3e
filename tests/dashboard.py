"""The panels of the dashboard as Grafana would read them, and their queries as Prometheus would get them."""

import json
from dataclasses import dataclass
from pathlib import Path

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "dashboards" / "block-utilization.json"
# What Grafana puts in the place of its variables: everything, and four scrapes of a second.
VARIABLES = {"$model_name": ".*", "$engine": ".*", "$__rate_interval": "4s"}


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    panel: str
    expression: str
    legend: str

    def executable(self) -> str:
        expression = self.expression
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)
        assert "$" not in expression, f"{expression} has a variable that is not known here"
        return expression

    def legend_of(self, labels: dict[str, str]) -> str:
        legend = self.legend
        for label, value in labels.items():
            legend = legend.replace(f"{{{{{label}}}}}", value)
        return legend


def queries() -> list[Query]:
    """All queries of all panels."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        Query(panel["title"], target["expr"], target["legendFormat"]) for panel in panels for target in panel["targets"]
    ]
