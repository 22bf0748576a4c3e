"""A batch on the terminal: its progress, and what it has done."""

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Self

import click
from rich import progress
from rich.console import Console

from blocks import counted
from services.cli.batch.plan import BatchPlan
from services.cli.batch.run import Totals

# The rate shown is that of the last seconds.
_RATE_SECONDS = 10.0
# Without a terminal a line is printed this often.
_LINE_SECONDS = 30.0


class Bar:
    """A progress bar on stderr; without a terminal, a line every half minute. Call it with the totals so far."""

    def __init__(self, plan: BatchPlan, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with the answers that are kept. `clock` returns seconds."""
        console = Console(stderr=True)
        self._plan = plan
        self._clock = clock
        self._seen = deque([(clock(), 0)])
        self._printed_at = clock()
        self._bar = progress.Progress(
            progress.TextColumn("run-batch"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[figures]}"),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=plan.lines, completed=plan.kept, figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, totals: Totals) -> None:
        """Show how far the run is."""
        now = self._clock()
        self._seen.append((now, totals.generated_tokens))
        while self._seen[0][0] < now - _RATE_SECONDS:
            self._seen.popleft()
        if self._bar.disable and now < self._printed_at + _LINE_SECONDS:
            return
        done, figures = self._plan.kept + totals.answers, self._figures(totals)
        if self._bar.disable:
            self._printed_at = now
            click.echo(f"{done:,} of {counted(self._plan.lines, 'request')} answered, {figures}", err=True)
        else:
            self._bar.update(self._task, completed=done, figures=figures)

    def _figures(self, totals: Totals) -> str:
        (begun, before), (now, until_now) = self._seen[0], self._seen[-1]
        rate = (until_now - before) / (now - begun) if now > begun else 0.0
        failed = totals.failures + self._plan.answers.failures
        return f"{rate:,.0f} tokens/s" + f", {failed:,} failed" * bool(failed)


def summary(plan: BatchPlan, totals: Totals, *, interrupted: bool) -> str:
    """Return what a run has done, in one line, with the answers that it has kept from earlier ones."""
    if not plan.lines:
        return f"done: there are no requests in {plan.name}"
    failed_before = f" ({plan.answers.failures:,} of them failed)" * bool(plan.answers.failures)
    left = counted(plan.lines - plan.kept - totals.answers, "request")
    rate = totals.generated_tokens / totals.seconds if totals.seconds else 0.0
    parts = [
        f"{'interrupted' if interrupted else 'done'}: {counted(totals.answers, 'request')} answered",
        f"{totals.failures:,} of them failed" * bool(totals.failures),
        f"{plan.kept:,} kept from before{failed_before}" * bool(plan.kept),
        f"{left} left" * interrupted,
        f"{totals.prompt_tokens:,} prompt tokens ({totals.cached_tokens:,} cached)",
        f"{totals.generated_tokens:,} generated in {totals.seconds:,.1f} s, {rate:,.1f} tokens/s",
    ]
    return ", ".join(filter(None, parts))


def write_results(path: str, plan: BatchPlan, totals: Totals) -> None:
    """Write the figures of a run as JSON."""
    counts = {name: value for name, value in asdict(totals).items() if isinstance(value, int)}
    times = {"seconds": totals.seconds, "cpu_seconds": totals.cpu_seconds}
    kept = {"kept": plan.kept, "kept_failures": plan.answers.failures}
    figures = {"lines": plan.lines, **kept, **counts, **times}
    Path(path).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
