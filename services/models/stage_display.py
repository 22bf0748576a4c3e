"""Progress of long tasks, and its display on a terminal."""

import logging
from typing import Protocol, Self

from rich import progress
from rich.console import Console


class StageProgress(Protocol):
    """Receives progress: called repeatedly during a stage; a new stage name ends the previous stage."""

    def __call__(self, stage: str, done_bytes: int = 0, total_bytes: int | None = None) -> None:
        """Report progress; without `total_bytes`, the length of the stage is unknown."""


class StageLog:
    """A StageProgress that logs the start of each stage."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._stage: str | None = None

    def __call__(self, stage: str, done_bytes: int = 0, total_bytes: int | None = None) -> None:
        """Log a new stage."""
        del done_bytes, total_bytes
        if stage != self._stage:
            self._stage = stage
            self._log.info("%s", stage)


class StageDisplay:
    """A StageProgress on stderr: bars on a terminal, otherwise one line per stage.

    Use it as a context manager; a normal exit completes the last bar.
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            console=self._console,
        )
        self._stage: str | None = None
        self._task: progress.TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._task is None:
            return
        if kind is None:
            self._complete(self._task)
        self._bars.stop()

    def __call__(self, stage: str, done_bytes: int = 0, total_bytes: int | None = None) -> None:
        """Show the progress of `stage`."""
        if stage != self._stage:
            self._stage = stage
            self._begin(stage)
        if self._task is not None and total_bytes is not None:
            self._bars.update(self._task, completed=min(done_bytes, total_bytes), total=total_bytes)

    def _begin(self, stage: str) -> None:
        if not self._console.is_interactive:
            self._console.print(stage, markup=False, highlight=False, soft_wrap=True)
            return
        if self._task is not None:
            self._complete(self._task)
        self._bars.start()
        self._task = self._bars.add_task(stage, total=None)

    def _complete(self, task: progress.TaskID) -> None:
        self._bars.update(task, completed=1, total=1)
