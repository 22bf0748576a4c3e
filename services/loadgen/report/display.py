"""Progress of a run on a terminal."""

from collections.abc import Sequence
from typing import Self

from rich import progress
from rich.console import Console

from services.loadgen.driver import Progress
from services.loadgen.workload.load import Load

# Live throughput is that of the last seconds.
_WINDOW_SECONDS = 3.0


class Bar:
    """A progress bar on stderr: of requests if their number is known, otherwise of time. Shown only on a terminal."""

    def __init__(self, title: str, load: Load) -> None:
        console = Console(stderr=True)
        self._requests = load.request_count()
        self._total = self._requests or load.bounds.most_seconds or 0.0
        self._seen = [(0.0, 0)]
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task(title, total=self._total, figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, seconds: float, shares: Sequence[Progress]) -> None:
        """Show the progress of all processes, given the seconds since the start."""
        sent, ended, failed, tokens = (sum(one) for one in zip(*shares, strict=True))
        failures = f", {failed:,} failed" if failed else ""
        figures = f"{ended:,} done, {sent - ended:,} in flight{failures}, {self._rate(seconds, tokens):,.0f} tokens/s"
        done = ended if self._requests else min(seconds, self._total)
        self._bar.update(self._task, completed=done, figures=figures)

    def _rate(self, seconds: float, tokens: int) -> float:
        """Return the tokens per second since the window began."""
        self._seen = [one for one in self._seen if one[0] >= seconds - _WINDOW_SECONDS] + [(seconds, tokens)]
        (begun, before), (now, until_now) = self._seen[0], self._seen[-1]
        return (until_now - before) / (now - begun) if now > begun else 0.0
