"""Queries, panels and rows of Quire's Grafana dashboards, and their conversion to Grafana's JSON."""

from dataclasses import dataclass, field
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DynamicConfigValue,
    FieldColor,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

OF_RELEASE = 'namespace=~"$namespace",release=~"$release"'
OF_MODEL = f'{OF_RELEASE},model_name=~"$model_name"'
OF_ENGINE = f'{OF_MODEL},engine=~"$engine"'
OF_JOBS = f'{OF_RELEASE},job=~".*quire.*"'
OF_TENANT = f'{OF_MODEL},tenant=~"$tenant"'
# Labels of every aggregation, which tell installations apart; empty where Prometheus does not set them.
BY_RELEASE = "namespace, release"
RATE = "[$__rate_interval]"

# In stacking order, from the bottom.
STATES = {"held": "#3274D9", "cached": "#8AB8FF", "free": "#E0E0E0", "withheld": "#E02F44"}
SLOTS = {"tokens": "#3274D9", "reserved": "#F2CC0C", "lookahead": "#FF9830", "internal": "#E02F44"}
PHASES = {"plan": "#8AB8FF", "wait": "#E02F44", "forward": "#3274D9", "sample": "#FF9830", "publish": "#73BF69"}

_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH, _HEIGHT = 8, 8  # three panels in a row of Grafana's 24 columns
_STAT_WIDTH, _STAT_HEIGHT = 4, 4
_VARIABLES = {
    "namespace": ("Namespace", 'up{job=~".*quire.*"}'),
    "release": ("Release", 'up{namespace=~"$namespace",job=~".*quire.*"}'),
    "model_name": ("Model", f"quire_kv_pool_blocks{{{OF_RELEASE}}}"),
    "engine": ("Engine", f"quire_kv_pool_blocks{{{OF_MODEL}}}"),
    "tenant": ("Tenant", f"quire_tenant_requests_total{{{OF_MODEL}}}"),
}


@dataclass(frozen=True)
class Query:
    """One query and the legend of its series, before which the panel shows namespace and release."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """Lines over time. `warn` and `alarm` are the values from which they turn orange and red.

    `stacked` maps the last word of the legends of stacked series to their colours.
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    maximum: float | None = None
    stacked: dict[str, str] = field(default_factory=dict)
    warn: float | None = None
    alarm: float | None = None


@dataclass(frozen=True)
class Figure(Panel):
    """The current value of each series, as a number."""


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """A dashboard. `variables` are the labels that it can be filtered by, besides namespace and release."""

    title: str
    description: str
    variables: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def uid(self) -> str:
        """Identifier in links."""
        return "quire-" + self.file_name.removesuffix(".json")

    @property
    def file_name(self) -> str:
        """Name of its JSON file."""
        return self.title.lower().replace(" ", "-") + ".json"

    def as_json(self) -> str:
        """Return Grafana's JSON."""
        board = (
            dashboard.Dashboard(self.title)
            .uid(self.uid)
            .description(self.description)
            .tags(["quire"])
            .time("now-1h", "now")
            .refresh("10s")
            .tooltip(DashboardCursorSync.CROSSHAIR)
            .readonly()
            .link(
                dashboard.DashboardLink("Quire")
                .type(DashboardLinkType.DASHBOARDS)
                .tags(["quire"])
                .include_vars(True)
                .keep_time(True)
            )
            .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        )
        for name in ("namespace", "release", *self.variables):
            board = board.with_variable(_label_variable(name))
        for row in self.rows:
            board = board.with_row(dashboard.Row(row.title))
            for panel in row.panels:
                board = board.with_panel(_figure(panel) if isinstance(panel, Figure) else _lines(panel))
        return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def rate(counter: str, by: str = "engine", selector: str = OF_ENGINE) -> str:
    """Return a query for the growth of a counter per second."""
    return f"sum by ({BY_RELEASE}, {by}) (rate({counter}{{{selector}}}{RATE}))"


def quantile(share: float, histogram: str, by: str = "engine", selector: str = OF_ENGINE) -> str:
    """Return a query for a quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', f'{by}, le', selector)})"


def quantiles(histogram: str, by: str = "engine", selector: str = OF_ENGINE) -> tuple[Query, ...]:
    """Return queries for the quantiles 0.5, 0.95 and 0.99."""
    return tuple(
        Query(quantile(share, histogram, by, selector), f"{{{{{by}}}}} {name}")
        for share, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    )


def ratio(part: str, whole: str) -> str:
    """Return a query for a ratio; it has no data while `whole` is 0."""
    return f"{part} / ({whole} > 0)"


def _label_variable(name: str) -> dashboard.QueryVariable:
    label, metric = _VARIABLES[name]
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(f"label_values({metric}, {name})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .all_value(".*")
        .multi(True)
    )


def _lines(panel: Panel) -> timeseries.Panel:
    lines = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .min(0)
        .span(_WIDTH)
        .height(_HEIGHT)
        .line_width(1)
        .fill_opacity(70 if panel.stacked else 8)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if panel.maximum is not None:
        lines = lines.max(panel.maximum)
    if panel.stacked:
        lines = _on_each_other(lines, panel.stacked)
    if panel.warn is not None and panel.alarm is not None:
        lines = lines.thresholds(_thresholds(panel.warn, panel.alarm)).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.DASHED)
        )
    for target in _targets(panel):
        lines = lines.with_target(target.range())
    return lines


def _figure(panel: Figure) -> stat.Panel:
    figure = (
        stat.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .span(_STAT_WIDTH)
        .height(_STAT_HEIGHT)
    )
    if panel.warn is not None and panel.alarm is not None:
        figure = figure.thresholds(_thresholds(panel.warn, panel.alarm))
    for target in _targets(panel):
        figure = figure.with_target(target.instant())
    return figure


def _targets(panel: Panel) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery()
        .ref_id(letter)
        .expr(query.expr)
        .legend_format("{{namespace}} {{release}} " + query.legend)
        for letter, query in zip(ascii_uppercase, panel.queries, strict=False)
    ]


def _on_each_other(lines: timeseries.Panel, colors: dict[str, str]) -> timeseries.Panel:
    lines = lines.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for word, color in colors.items():
        fixed = FieldColor(mode=FieldColorModeId.FIXED, fixed_color=color)
        lines = lines.override_by_regexp(f"/ {word}$/", [DynamicConfigValue(id_val="color", value=fixed)])
    return lines


def _thresholds(warn: float, alarm: float) -> dashboard.ThresholdsConfig:
    steps = [
        Threshold(value=None, color="green"),
        Threshold(value=warn, color="orange"),
        Threshold(value=alarm, color="red"),
    ]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)
