"""Draws panels of the dashboard "Block utilization" from a real Prometheus that scraped Quire under load.

Sessions of several turns use the demo model: a few at first, then more than its pool can hold. With a folder as its
argument it draws every panel of every dashboard into it, and publishes nothing.
"""

import math
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import matplotlib as mpl
import matplotlib.pyplot as plt
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich.progress import Progress

from bench.report.picture import GREY, OTHER, PEER, QUIRE, TARGET
from bench.report.results import Row, publish, repeated, row
from bench.report.targets import ROOT
from bench.report.terms import Terms
from services.loadgen.report.drawing import STYLE
from tests.deployment.dashboard import Panel, Query, dashboards
from tests.deployment.prometheus import ALERTS, RunningPrometheus, prometheus_folder
from tests.load import prompt_request
from tests.running_quire import RunningQuire, start_quire

PICTURE = ROOT / "docs" / "images" / "block-utilization.png"
POOL_BLOCKS = 160
TURNS = 3
# Sessions and their concurrency: low load, high load, overload, low load.
PHASES = ((3, 3), (12, 8), (24, 16), (2, 2))
MAX_TOKENS = 48
RATE_SECONDS = "10s"
TERMS = {"quire": Terms(weights="int4", processes=3, work="sessions of several turns", start="cold")}
CODE = ("kvmanager", "services", "deploy", "bench/serving/dashboard.py")

_BEGINNING = (
    "You keep the books of a harbour. Ships come with grain, salt, wool and letters, and leave with wine, rope and "
    "timber. You know every captain by name, every pier by its number, and what each cask weighs. Somebody asks you, "
    "and you answer in a few plain words.\n"
)
_CARGOES = ("grain", "salt", "wool", "letters", "wine", "rope", "timber", "tin", "herring", "oranges")
_COLUMNS = 3
# Panels with one series, which need no legend.
_UNTOLD = {"namespace": "", "release": "", "engine": "", "model_name": "", "tenant": "", "instance": ""}
SHOWN = (
    *("Blocks by state", "Share of the pool that is held", "Share of slots with tokens"),
    *("Sharing", "Prefix cache hit rate", "Blocks granted, evicted and copied"),
    *("Preemptions", "Cost of preemptions", "Refused block operations"),
    *("Requests", "Step latency of the engine", "Latency of the KV manager's block steps"),
)


@dataclass(frozen=True)
class _Span:
    """Start and end of the load, in seconds since 1970."""

    start: float
    end: float


def main() -> None:
    """Run the load, draw the panels, and publish the cost of a scrape."""
    with tempfile.TemporaryDirectory() as folder:
        quire = start_quire("--model", "demo", "--device-blocks", str(POOL_BLOCKS))
        targets = {name: url.split("/")[2] for name, url in quire.metrics_urls.items()}
        rules = {ALERTS.name: ALERTS.read_text()}
        prometheus = RunningPrometheus(prometheus_folder(), Path(folder), targets, rules)
        try:
            prometheus.wait_until("quire_kv_pool_blocks")
            start = time.time()
            for _ in repeated(1, "dashboard", warm_up=False):
                _load(quire)
            quire.settled_pool()
            span = _Span(start, time.time())
            if sys.argv[1:]:
                _draw_all(prometheus, span, Path(sys.argv[1]))
                return
            panels = {panel.title: panel for board in dashboards() for panel in board.panels}
            _draw(prometheus, span, [panels[title] for title in SHOWN], PICTURE)
            seconds = _scrape_seconds(prometheus, span)
            rows = _rows(prometheus, span, seconds)
            publish("dashboard", rows, 1, code=CODE, picture=str(PICTURE.relative_to(ROOT)), scrape_seconds=seconds)
        finally:
            prometheus.close()
            quire.close()


def _load(quire: RunningQuire) -> None:
    with Progress() as progress:
        turns = progress.add_task("Talking to Quire", total=TURNS * sum(sessions for sessions, _ in PHASES))

        def talk(number: int) -> None:
            text = f"{_BEGINNING}Captain {number} brings {_CARGOES[number % len(_CARGOES)]}. "
            for turn in range(TURNS):
                text += f"Question {turn + 1}: what does it weigh, and where is it kept? Answer:"
                text += quire.generate(prompt_request(text, MAX_TOKENS), timeout=600).text
                progress.advance(turns)

        first = 0
        for sessions, at_a_time in PHASES:
            with ThreadPoolExecutor(at_a_time) as clients:
                list(clients.map(talk, range(first, first + sessions)))
            first += sessions


def _scrape_seconds(prometheus: RunningPrometheus, span: _Span) -> list[float]:
    scrapes = prometheus.query_range("scrape_duration_seconds", span.start, span.end)
    return [float(value) for one in scrapes for _, value in one["values"]]


def _rows(prometheus: RunningPrometheus, span: _Span, values: list[float]) -> list[Row]:
    unequal = "sum by (engine, tier) (quire_kv_blocks) != on (engine, tier) quire_kv_pool_blocks"
    return [
        row("dashboard", "scrapes", len(values), "scrapes", terms=TERMS),
        row("dashboard", "scrape_seconds_p50", round(quantiles(values, n=100)[49], 4), "s", terms=TERMS),
        row("dashboard", "scrape_seconds_p99", round(quantiles(values, n=100)[98], 4), "s", terms=TERMS),
        row(
            "dashboard",
            "scrapes_where_states_differ_from_the_pool",
            sum(len(one["values"]) for one in prometheus.query_range(unequal, span.start, span.end)),
            "scrapes",
            terms=TERMS,
        ),
    ]


def _draw_all(prometheus: RunningPrometheus, span: _Span, folder: Path) -> None:
    for board in dashboards():
        _draw(prometheus, span, board.panels, folder / f"{board.uid}.png")


def _draw(prometheus: RunningPrometheus, span: _Span, panels: Sequence[Panel], picture: Path) -> None:
    mpl.rcParams.update(STYLE | {"font.size": 8, "axes.prop_cycle": cycler(color=[QUIRE, PEER, GREY, TARGET, OTHER])})
    rows = math.ceil(len(panels) / _COLUMNS)
    figure, grid = plt.subplots(rows, _COLUMNS, figsize=(13, 2.9 * rows), layout="constrained", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel, prometheus, span)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def _draw_panel(axes: Axes, panel: Panel, prometheus: RunningPrometheus, span: _Span) -> None:
    lines = [line for query in panel.queries for line in _lines(query, prometheus, span)]
    if panel.stacked and lines:
        times = lines[0][1]
        colors = [panel.colors[name.split()[-1]] for name, _, _ in lines]
        axes.stackplot(times, *(values for _, _, values in lines), labels=[name for name, _, _ in lines], colors=colors)
    else:
        for name, times, values in lines:
            axes.plot(times, values, label=name, linewidth=1.2)
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.set_xlim(0, span.end - span.start)
    axes.set_ylim(0, panel.maximum)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{int(seconds) // 60}:{int(seconds) % 60:02d}"))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 3, 6]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _formatted(value, panel.unit)))
    axes.grid(visible=True)
    if len(lines) > 1:
        ncols = 4 if sum(len(name) for name, _, _ in lines) < 50 else 2
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=ncols, frameon=False)


def _lines(query: Query, prometheus: RunningPrometheus, span: _Span) -> list[tuple[str, list[float], list[float]]]:
    """Return name, times in seconds since the start, and values of each series of a query."""
    found = prometheus.query_range(query.executable(RATE_SECONDS), span.start, span.end)
    lines = []
    for series in found:
        name = query.legend_of(series["metric"] | _UNTOLD)
        times = [at - span.start for at, _ in series["values"]]
        lines.append((name, times, [float(value) for _, value in series["values"]]))
    return lines


def _formatted(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s":
        return f"{value * 1000:g} ms" if value < 1 else f"{value:g} s"
    return f"{value:g}" + (unit if unit == "/s" else "")


if __name__ == "__main__":
    main()
