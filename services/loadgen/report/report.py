"""The report of a command's runs: a table for people, JSON for programs."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from services.loadgen.clients.target import Server, Target
from services.loadgen.report import machine
from services.loadgen.run import Run
from services.loadgen.statistics import Spread, Summary
from services.loadgen.workload.load import Load

_PACKAGES = ("quire", "grpcio", "aiohttp", "numpy")
_LATENCIES = (
    ("Time to first token", "ttft"),
    ("Inter-token latency", "itl"),
    ("Time per output token", "tpot"),
    ("End to end", "e2e"),
    ("Normalized, per token", "normalized"),
    ("Queue time, by the server", "queued"),
)
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
_MILLI = 1e-3
# Smaller values come from timers and a busy machine.
_LATE_SECONDS = 0.02


@dataclass(frozen=True)
class Conditions:
    """Conditions shared by all runs of a command. `command` contains no secret."""

    command: list[str]
    seed: int
    target: Target
    server: Server
    load: Load
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    load_average: tuple[float, float, float] = field(default_factory=os.getloadavg)

    def as_json(self) -> dict[str, Any]:
        """Return them for a report."""
        return {
            "benchmark": "serve",
            "started": self.started,
            "command": self.command,
            "seed": self.seed,
            "hardware": machine.hardware(),
            "load_average": {"start": self.load_average, "end": os.getloadavg()},
            "versions": machine.versions(_PACKAGES),
            "target": self.target.as_json(),
            "server": vars(self.server),
            "workload": self.load.workload.as_json(),
            "bounds": vars(self.load.bounds),
        }


def write_json(path: Path, conditions: Conditions, runs: Sequence[Run]) -> None:
    """Write everything but the records; `runs` has one entry for each rate."""
    result = {**conditions.as_json(), "runs": [run.as_json() for run in runs]}
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")


def write_records(path: Path, runs: Sequence[Run]) -> None:
    """Write one line of JSON per request, including the warm-up, in the order of sending."""
    with path.open("w") as file:
        for place, run in enumerate(runs):
            for record in run.records:
                file.write(json.dumps({"run": place, **record.as_json()}) + "\n")


def show(console: Console, conditions: Conditions, runs: Sequence[Run]) -> None:
    """Print the target and the load, then the figures of each run, and for several runs a table of all."""
    for line in _heading(conditions):
        console.print(Text(line))
    for run in runs:
        console.print(_shown(run))
    if len(runs) > 1:
        console.print(_sweep(runs))


def _heading(conditions: Conditions) -> Iterator[str]:
    target, server = conditions.target, conditions.server
    yield _listed(f"{server.model} at {target.address} ({target.kind})", server.details)
    described = dict(conditions.load.workload.as_json())
    yield _listed(f"{described.pop('kind')} lengths", described)


def _listed(title: str, values: Mapping[str, Any]) -> str:
    return ", ".join([title, *(f"{name.replace('_', ' ')} {value}" for name, value in values.items())])


def _shown(run: Run) -> Group:
    summary = run.summary
    arrivals = dict(run.load.arrivals.as_json())
    kind = arrivals.pop("kind")
    title = _listed(f"{kind} arrivals" if kind != "closed loop" else kind, arrivals)
    return Group(
        Text(f"\n{title}: {_requests(summary)} in {summary.seconds:.1f} s", style="bold"),
        Padding(_figures(run), (0, 0, 1, 1)),
        Padding(_latencies(summary), (0, 0, 1, 1)),
        *(Text(f" {note}", style="yellow") for note in notes(run)),
    )


def _requests(summary: Summary) -> str:
    failed = summary.requests - summary.completed
    warmup = f", {summary.warmup_requests:,} of the warm-up not counted" if summary.warmup_requests else ""
    return f"{summary.completed:,} requests completed, {failed:,} failed{warmup}"


def _figures(run: Run) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for line in figures(run):
        table.add_row(*line)
    return table


def figures(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and remark of the figures other than latencies."""
    summary, client = run.summary, run.client
    yield "Requests", f"{summary.requests_per_second:,.2f}/s", f"at most {summary.most_in_flight:,} in flight"
    yield "Input tokens", f"{summary.input_tokens_per_second:,.1f}/s", f"{summary.input_tokens:,} in all"
    peak = f"most in a second {summary.peak_output_tokens_per_second:,.0f}"
    yield "Output tokens", f"{summary.output_tokens_per_second:,.1f}/s", f"{summary.output_tokens:,} in all, {peak}"
    if summary.prefix_hit_rate is None:
        yield "Prefix hit rate", "-", "not reported by the server" if summary.completed else ""
    else:
        cached = f"{summary.cached_tokens:,} of {summary.input_tokens:,} prompt tokens were cached"
        yield "Prefix hit rate", f"{100 * summary.prefix_hit_rate:.1f} %", cached
    if summary.goodput:
        limits = ", ".join(f"{name} {seconds:g} s" for name, seconds in summary.goodput.objectives.items())
        share = f"{100 * summary.goodput.share:.1f} % within {limits}"
        yield "Goodput", f"{summary.goodput.requests_per_second:,.2f}/s", share
    if summary.preemptions is not None:
        yield "Preemptions", f"{summary.preemptions:,}", f"{summary.recomputed_tokens:,} tokens computed again"
    if summary.failovers:
        yield "Failovers", f"{summary.failovers:,}", "failovers of requests to another engine"
    lag = client.loop_lag_seconds
    late = "" if lag is None else f", event loop late by p99 {lag.p99 / _MILLI:.1f} ms"
    per_token = client.cpu_microseconds_per_token
    cost = "" if per_token is None else f", {per_token:,.0f} µs a token"
    yield (
        "Client",
        f"{100 * client.busiest_cpu_share:.0f} %",
        f"of a core the busiest of {client.processes}{cost}{late}",
    )


def _latencies(summary: Summary) -> Table:
    table = Table("Latency, ms", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for title, name in _LATENCIES:
        values: Spread | None = getattr(summary.latencies, name)
        if values is not None:
            table.add_row(title, *(_milliseconds(getattr(values, column)) for column in _COLUMNS))
    return table


def notes(run: Run) -> Iterator[str]:
    """Yield notes on conditions that limit the validity of the figures."""
    summary = run.summary
    if run.interrupted:
        yield "Interrupted: requests that still ran are not counted."
    for status, count in summary.failures.items():
        message = next(record.message for record in run.records if record.status == status)
        yield f"{count:,} {'request' if count == 1 else 'requests'} ended with {status}: {message}"
    yield from _refused(summary)
    if summary.other_lengths:
        yield f"{summary.other_lengths:,} answers did not have the requested length."
    late = summary.late_seconds
    if run.load.arrivals.paced and late is not None and late.p99 > _LATE_SECONDS:
        why = "for lack of a free place" if run.load.arrivals.concurrency else "by the client"
        yield f"Requests were sent late {why}: p99 {late.p99 / _MILLI:,.0f} ms. Latencies begin when they were sent."
    if run.client.is_bottleneck:
        yield "The client may have been the bottleneck: compare with more --processes, or run it on another machine."


def _refused(summary: Summary) -> Iterator[str]:
    refusals = summary.refusals
    if refusals.seconds_to_answer is None:
        return
    soon = f"{refusals.count:,} requests were refused, within p99 {refusals.seconds_to_answer.p99 / _MILLI:.1f} ms"
    if refusals.retry_after_seconds is None:
        yield f"{soon}; none got a retry time."
    else:
        after = refusals.retry_after_seconds
        retries = f"{refusals.with_retry_after:,} got a retry time of p50 {after.p50:.1f} s, max {after.max:.1f} s"
        yield f"{soon}; {retries}."


def _sweep(runs: Sequence[Run]) -> Table:
    """Add a row for each rate."""
    columns = ("Rate", "req/s", "tok/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "normalized", "hits", "goodput")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="bold", title="All rates, ms")
    for column in table.columns:
        column.justify = "right"
    for run in runs:
        table.add_row(*_sweep_row(run))
    return table


def _sweep_row(run: Run) -> Iterator[str]:
    summary = run.summary
    yield str(run.load.arrivals.as_json()["rate"])
    yield f"{summary.requests_per_second:.2f}"
    yield f"{summary.output_tokens_per_second:,.0f}"
    for values in (summary.latencies.ttft, summary.latencies.itl):
        yield "-" if values is None else _milliseconds(values.p50)
        yield "-" if values is None else _milliseconds(values.p99)
    normalized = summary.latencies.normalized
    yield "-" if normalized is None else _milliseconds(normalized.mean)
    yield "-" if summary.prefix_hit_rate is None else f"{100 * summary.prefix_hit_rate:.0f} %"
    yield "-" if summary.goodput is None else f"{100 * summary.goodput.share:.0f} %"


def _milliseconds(seconds: float) -> str:
    value = seconds / _MILLI
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
