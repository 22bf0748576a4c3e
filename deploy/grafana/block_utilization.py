"""The Grafana dashboard "Block utilization", as code: `python block_utilization.py FOLDER ...` writes it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DynamicConfigValue,
    FieldColor,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

FILE_NAME = "block-utilization.json"
_WIDTH, _HEIGHT = 8, 8  # three panels in a row of Grafana's 24 columns
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

_OF = 'model_name=~"$model_name",engine=~"$engine"'
_RATE = "[$__rate_interval]"
# In the order in which they are stacked, from below.
_STATE_COLORS = {"held": "#3274D9", "cached": "#8AB8FF", "free": "#E0E0E0", "withheld": "#E02F44"}


@dataclass(frozen=True)
class Query:
    """One query and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """Lines over time. `warn` and `alarm` are the values from which they turn orange and red."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    most: float | None = None
    stacked: bool = False
    warn: float | None = None
    alarm: float | None = None


def _rate(counter: str, by: str = "engine") -> str:
    return f"sum by ({by}) (rate({counter}{{{_OF}}}{_RATE}))"


def _quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share}, {_rate(f'{histogram}_bucket', 'engine, le')})"


PANELS = (
    Panel(
        "Blocks by state",
        "Every block of the pool is in one state. Held: a running request needs it. Cached: nobody holds it, but a "
        "prompt with the same beginning can. Free: empty. Withheld: taken out by the audit.",
        tuple(
            Query(f'quire_kv_blocks{{{_OF},tier="device",state="{state}"}}', f"{{{{engine}}}} {state}")
            for state in _STATE_COLORS
        ),
        stacked=True,
    ),
    Panel(
        "Share of the pool that is held",
        "Near 1, new requests wait and running ones are preempted.",
        (Query(f"quire_kv_cache_usage_perc{{{_OF}}}", "{{engine}}"),),
        unit="percentunit",
        most=1,
        warn=0.9,
        alarm=0.98,
    ),
    Panel(
        "Share of slots holding tokens",
        "Tokens that held blocks contain, of those that they could. What is missing is the unfilled end of each "
        "sequence's last block, and room granted ahead.",
        (Query(f"quire_kv_held_tokens{{{_OF}}} / (quire_kv_held_slots{{{_OF}}} > 0)", "{{engine}}"),),
        unit="percentunit",
        most=1,
    ),
    Panel(
        "Sharing",
        "Saved: blocks that would be needed in addition if nothing were shared. Shared: blocks held more than once.",
        (
            Query(f"quire_kv_saved_blocks{{{_OF}}}", "{{engine}} saved"),
            Query(f"quire_kv_shared_blocks{{{_OF}}}", "{{engine}} shared"),
        ),
    ),
    Panel(
        "Prefix cache hit rate",
        "Tokens of prompts that were found in the cache, of all that were looked for.",
        (
            Query(
                f"{_rate('quire_prefix_cache_hits_total')} / ({_rate('quire_prefix_cache_queries_total')} > 0)",
                "{{engine}}",
            ),
        ),
        unit="percentunit",
        most=1,
    ),
    Panel(
        "Blocks granted, evicted and copied",
        "Evicted: cached blocks whose contents were given up for space. Copied: shared blocks before they were "
        "written to.",
        (
            Query(_rate("quire_kv_granted_blocks_total"), "{{engine}} granted"),
            Query(_rate("quire_kv_evicted_blocks_total"), "{{engine}} evicted"),
            Query(_rate("quire_kv_copied_blocks_total"), "{{engine}} copied"),
        ),
        unit="/s",
    ),
    Panel(
        "Preemptions",
        "Running requests that lost their blocks to others, a second.",
        (Query(_rate("quire_num_preemptions_total"), "{{engine}}"),),
        unit="/s",
        warn=0.001,
        alarm=1,
    ),
    Panel(
        "Tokens computed again",
        "What preemptions cost: tokens that had been computed before, a second.",
        (Query(_rate("quire_recomputed_tokens_total"), "{{engine}}"),),
        unit="tokens/s",
    ),
    Panel(
        "Refused block operations",
        "Items of an engine's Steps that the KV manager refused, a second. out_of_blocks is how a full pool says so; "
        "anything else is a fault.",
        (Query(_rate("quire_kv_refusals_total", "engine, reason"), "{{engine}} {{reason}}"),),
        unit="/s",
    ),
    Panel(
        "Requests",
        "Running requests hold blocks, waiting ones do not.",
        (
            Query(f"quire_num_requests_running{{{_OF}}}", "{{engine}} running"),
            Query(f"quire_num_requests_waiting{{{_OF}}}", "{{engine}} waiting"),
        ),
    ),
    Panel(
        "Step latency of the engine",
        "Model and sampling of one step.",
        (
            Query(_quantile(0.5, "quire_step_seconds"), "{{engine}} p50"),
            Query(_quantile(0.99, "quire_step_seconds"), "{{engine}} p99"),
        ),
        unit="s",
    ),
    Panel(
        "Step latency of the KV manager",
        "Reading, applying and answering the block operations of one step.",
        (
            Query(_quantile(0.5, "quire_kv_step_seconds"), "{{engine}} p50"),
            Query(_quantile(0.99, "quire_kv_step_seconds"), "{{engine}} p99"),
        ),
        unit="s",
    ),
)


def build() -> str:
    """Return the dashboard as JSON."""
    board = (
        dashboard.Dashboard("Block utilization")
        .uid("quire-block-utilization")
        .description("What the blocks of the KV cache are used for, by engine.")
        .tags(["quire"])
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .readonly()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_label_variable("model_name", "Model", "quire_kv_pool_blocks"))
        .with_variable(_label_variable("engine", "Engine", 'quire_kv_pool_blocks{model_name=~"$model_name"}'))
    )
    for panel in PANELS:
        board = board.with_panel(_lines(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def _label_variable(name: str, label: str, metric: str) -> dashboard.QueryVariable:
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
    if panel.most is not None:
        lines = lines.max(panel.most)
    if panel.stacked:
        lines = _with_states(lines)
    if panel.warn is not None and panel.alarm is not None:
        lines = _with_thresholds(lines, panel.warn, panel.alarm)
    for letter, query in zip(ascii_uppercase, panel.queries, strict=False):
        target = prometheus.Dataquery().ref_id(letter).expr(query.expr).legend_format(query.legend).range()
        lines = lines.with_target(target)
    return lines


def _with_states(lines: timeseries.Panel) -> timeseries.Panel:
    lines = lines.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    for state, color in _STATE_COLORS.items():
        fixed = FieldColor(mode=FieldColorModeId.FIXED, fixed_color=color)
        lines = lines.override_by_regexp(f"/ {state}$/", [DynamicConfigValue(id_val="color", value=fixed)])
    return lines


def _with_thresholds(lines: timeseries.Panel, warn: float, alarm: float) -> timeseries.Panel:
    steps = [
        Threshold(value=None, color="green"),
        Threshold(value=warn, color="orange"),
        Threshold(value=alarm, color="red"),
    ]
    return lines.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)).thresholds_style(
        common.GraphThresholdsStyleConfig().mode("dashed")
    )


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        (Path(folder) / FILE_NAME).write_text(build())
