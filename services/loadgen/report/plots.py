"""Plots of runs: latency distributions and load over time; for several rates, latency against rate."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.loadgen.records import Record
from services.loadgen.report.drawing import BLUE, GREY, ORANGE, RED, SKY, STYLE
from services.loadgen.run import Run
from services.loadgen.statistics import gaps_of, in_flight, joined, tokens_over_time

_MILLI = 1e-3
_SLICES = 60
_SHORTEST_SLICE_SECONDS = 0.5
# Above curves, so that no legend covers one.
_HEADROOM = 1.25
_MOST_POINTS = 2000


def draw(path: Path, title: str, runs: Sequence[Run]) -> None:
    """Plot the runs into a file whose suffix is the format: one run over time, several against their rates."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context(STYLE):
        figure, grid = pyplot.subplots(2, 2, figsize=(10, 6.6), layout="constrained")
        if len(runs) > 1:
            _rates(grid.flat, runs)
        else:
            _one(grid.flat, runs[0])
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _one(panels: Sequence[Any], run: Run) -> None:
    done = [record for record in run.counted if record.completed and record.times]
    _cumulative(panels[0], "Time to first token", [record.times[0] - record.sent for record in done])
    _cumulative(panels[1], "Inter-token latency", joined(gaps_of(record) for record in done))
    _tokens(panels[2], run)
    _requests(panels[3], run.records)


def _cumulative(axes: Any, title: str, seconds: Iterable[float]) -> None:
    """Plot the share of values up to each value, with the median and the 99th percentile."""
    values = np.sort(np.fromiter(seconds, np.float64)) / _MILLI
    axes.set_title(title)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share up to there")
    axes.set_ylim(0, 1.02)
    if not len(values):
        return
    shares = np.linspace(0, 1, min(len(values), _MOST_POINTS))
    axes.plot(np.quantile(values, shares), shares, color=BLUE, linewidth=1.8)
    for share, color in ((0.5, ORANGE), (0.99, RED)):
        at = float(np.quantile(values, share))
        axes.axvline(at, color=color, linestyle="--", linewidth=1.2, label=f"p{100 * share:.0f}: {at:,.1f} ms")
    # The longest are rare, and would squeeze all others into a line.
    axes.set_xlim(0, 1.3 * float(np.quantile(values, 0.995)) or None)
    axes.legend(loc="lower right")


def _tokens(axes: Any, run: Run) -> None:
    last = max((record.ended for record in run.records), default=1.0)
    starts, rates = tokens_over_time(run.records, max(last / _SLICES, _SHORTEST_SLICE_SECONDS))
    axes.step(starts, rates, where="post", color=BLUE, linewidth=1.2)
    axes.axhline(run.summary.output_tokens_per_second, color=ORANGE, linestyle="--", linewidth=1.2, label="mean")
    _warmup(axes, run)
    axes.set_title("Output tokens per second")
    axes.set_xlabel("seconds since the beginning")
    _room(axes)


def _warmup(axes: Any, run: Run) -> None:
    """Shade the warm-up."""
    warmup = run.records[: run.summary.warmup_requests]
    if warmup and len(run.records) > len(warmup):
        axes.axvspan(0, run.records[len(warmup)].sent, color="#F2F2F2", label="warm-up")


def _requests(axes: Any, records: Sequence[Record]) -> None:
    """Plot the number of requests in flight, and of those without their first token."""
    sent = np.array([record.sent for record in records])
    ended = np.array([record.ended for record in records])
    first = np.array([record.ended if record.first_token is None else record.first_token for record in records])
    for ends, label, color in ((ended, "in flight", SKY), (first, "waiting for the first token", RED)):
        moments, open_then = in_flight(sent, ends)
        axes.step(moments, open_then, where="post", color=color, linewidth=1.2, label=label)
    axes.set_title("Requests")
    axes.set_xlabel("seconds since the beginning")
    _room(axes)


def _room(axes: Any) -> None:
    """Start both axes at 0, and put the legend above the curves."""
    axes.set_xlim(0, None)
    axes.set_ylim(0, _HEADROOM * axes.dataLim.ymax or 1.0)
    axes.legend(loc="upper right", ncols=2)


def _rates(panels: Sequence[Any], runs: Sequence[Run]) -> None:
    rates = [float(run.load.arrivals.as_json()["rate"]) for run in runs]
    summaries = [run.summary for run in runs]
    latencies = [summary.latencies for summary in summaries]
    means = [None if one.normalized is None else one.normalized.mean for one in latencies]
    _lines(panels[0], rates, {"mean": means})
    panels[0].set_title("Normalized latency, ms per token")
    for axes, name, title in (
        (panels[1], "ttft", "Time to first token, ms"),
        (panels[2], "itl", "Inter-token latency, ms"),
    ):
        spreads = [getattr(one, name) for one in latencies]
        _lines(axes, rates, {f"p{p}": [one and getattr(one, f"p{p}") for one in spreads] for p in (50, 90, 99)})
        axes.set_title(title)
    panels[3].plot(rates, rates, color=GREY, linestyle="--", linewidth=1.2, label="asked")
    done = [summary.requests_per_second for summary in summaries]
    panels[3].plot(rates, done, color=BLUE, marker="o", label="completed")
    if all(summary.goodput for summary in summaries):
        good = [summary.goodput.requests_per_second for summary in summaries if summary.goodput]
        panels[3].plot(rates, good, color=RED, marker="o", label="within the objectives")
    panels[3].set_title("Requests per second")
    for axes in panels:
        axes.set_xlabel("sessions started per second" if _has_sessions(runs) else "requests sent per second")
        _room(axes)


def _has_sessions(runs: Sequence[Run]) -> bool:
    return any(record.session != record.number for run in runs for record in run.records)


def _lines(axes: Any, rates: Sequence[float], lines: dict[str, list[float | None]]) -> None:
    for (label, seconds), color in zip(lines.items(), (BLUE, ORANGE, RED), strict=False):
        values = [np.nan if one is None else one / _MILLI for one in seconds]
        axes.plot(rates, values, color=color, marker="o", label=label)
