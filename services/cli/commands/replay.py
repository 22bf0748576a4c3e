"""`quire replay`: runs a record again, and says what came of it."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine.run import record as requests
from engine.run.record import RecordedRequest, RecordSettings
from kvmanager.history import record as operations
from services.cli.commands.replay_requests import Figures, RequestsReplay

_LABELS = {
    "requests": "requests",
    "refused": "requests that the pool could never hold",
    "left_out": "requests left out: they ended without a token",
    "prompt_tokens": "prompt tokens",
    "hit_tokens": "prompt tokens found in the prefix cache",
    "hit_rate": "hit rate",
    "output_tokens": "tokens generated",
    "preemptions": "preemptions",
    "recomputed_tokens": "tokens recomputed",
    "swapped_tokens": "tokens swapped out",
    "peak_held_blocks": "blocks held at the peak",
    "waste": "granted slots that held no token",
    "completion_steps_mean": "steps to completion, mean",
    "completion_steps_p50": "steps to completion, median",
    "completion_steps_p99": "steps to completion, 99th percentile",
    "steps": "steps in all",
}
_SHARES = ("hit_rate", "waste")


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line; None and False where nothing was."""

    device_blocks: int | None = None
    block_size: int | None = None
    host_blocks: int | None = None
    preemption: str | None = None
    no_prefix_cache: bool = False
    token_budget: int | None = None
    max_sequences: int | None = None
    admission_watermark: float | None = None

    def given(self) -> list[str]:
        """Return the names of the options that were given."""
        return [
            "--" + name.replace("_", "-")
            for name, value in asdict(self).items()
            if value is not None and value is not False
        ]


class _Failed(Exception):
    """The record cannot be replayed; the message says why."""


def replay(file: str, options: Options, as_json: bool) -> int:
    """Replay a record of either kind; return 0, or 1 after saying in one line where it parts or why it cannot be read.

    Raises click.UsageError, naming the option, for what cannot be asked for.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with Path(file).open("rb") as opened, _progress(errors) as progress:
            lines = _Lines(opened, os.fstat(opened.fileno()).st_size)
            first = next(iter(lines), "")
            if _format(first) == operations.OPERATIONS_FORMAT:
                return _replay_operations(first, lines, options, as_json, progress)
            return _replay_requests(first, lines, options, as_json, progress)
    except (OSError, UnicodeDecodeError, operations.InvalidRecord, requests.InvalidRecord, _Failed) as error:
        errors.print(f"{file} cannot be replayed: {error}", style="red", markup=False)
        return 1


def _format(line: str) -> str:
    try:
        header = json.loads(line)
        found = header["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Failed("it is no record of Quire: its first line says no format") from error
    if found not in (operations.OPERATIONS_FORMAT, requests.REQUESTS_FORMAT):
        raise _Failed(f"its format is {found!r}, which this version does not know")
    return str(found)


class _Lines:
    """The lines of a record. `cut_off` says afterwards whether the last one was cut off, and so left out."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size
        self.read = 0
        self.cut_off = False

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.read += len(line)
            if not line.endswith(b"\n"):
                self.cut_off = True
                return
            yield line.decode()

    def why_it_ends(self, end: str | None) -> str:
        """Return how the record ends, in words."""
        if end is not None:
            return end
        return "its writer was cut off in a line" if self.cut_off else "its writer was cut off"


_Advance = Callable[[float, float], None]


@contextmanager
def _progress(console: Console) -> Iterator[_Advance]:
    """Show a bar on a terminal, by what is done and what there is in all."""
    columns = (TextColumn("Replaying"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("")
        yield lambda done, total: progress.update(task, completed=done, total=total)


# Operations.


def _replay_operations(first: str, lines: _Lines, options: Options, as_json: bool, progress: _Advance) -> int:
    if given := options.given():
        raise click.UsageError(f"{given[0]} is for a record of requests; this one is of operations")
    replayed = operations.OperationsReplay.of(first)
    parted = None
    try:
        for line in lines:
            replayed.take(line)
            progress(lines.read, lines.size)
        replayed.pool  # noqa: B018  (a record without a snapshot is none)
    except operations.RecordParted as error:
        parted = error
    _show_operations(replayed, parted, lines.why_it_ends(replayed.end), as_json)
    return 0 if parted is None else 1


def _show_operations(
    replayed: operations.OperationsReplay, parted: operations.RecordParted | None, end: str, as_json: bool
) -> None:
    if as_json:
        figures: dict[str, Any] = {
            "kind": "operations",
            "right": parted is None,
            "parted_at": parted.step if parted else None,
            "steps": replayed.steps,
            "checksum": replayed.checksum,
            "end": end,
        }
        click.echo(json.dumps(figures))
    elif parted:
        click.echo(f"The replay parts after {replayed.steps} steps: {parted}.")
    else:
        click.echo(f"The checksum is right: {replayed.steps} steps, {replayed.checksum}. The record ends: {end}.")


# Requests.


def _replay_requests(first: str, lines: _Lines, options: Options, as_json: bool, progress: _Advance) -> int:
    recorded = requests.read_header(first)
    found, end = _read_requests(lines)
    settings = _settings(recorded, options)
    try:
        run = RequestsReplay(
            settings,
            found,
            recorded.block_size,
            prefix_cache=not options.no_prefix_cache,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    figures = run.run(lambda ended: progress(ended, len(found)))
    _show_requests(figures, settings, lines.why_it_ends(end), as_json)
    return 0


def _read_requests(lines: _Lines) -> tuple[list[RecordedRequest], str | None]:
    found: list[RecordedRequest] = []
    for number, line in enumerate(lines, 2):
        one = requests.read_request(line, number)
        if isinstance(one, str):
            return found, one
        found.append(one)
    return found, None


def _settings(recorded: RecordSettings, options: Options) -> RecordSettings:
    """Return what was recorded, but for what was asked; other blocks are as many as the same memory holds."""
    size = options.block_size or recorded.block_size
    return RecordSettings(
        block_size=size,
        device_blocks=options.device_blocks or max(1, recorded.device_blocks * recorded.block_size // size),
        token_budget=options.token_budget or recorded.token_budget,
        max_sequences=options.max_sequences or recorded.max_sequences,
        host_blocks=recorded.host_blocks if options.host_blocks is None else options.host_blocks,
        preemption=options.preemption or recorded.preemption,
        admission_watermark=(
            recorded.admission_watermark if options.admission_watermark is None else options.admission_watermark
        ),
        ahead=recorded.ahead,
    )


def _show_requests(figures: Figures, settings: RecordSettings, end: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"kind": "requests", "settings": asdict(settings), **asdict(figures), "end": end}))
        return
    title = f"{settings.device_blocks} blocks of {settings.block_size} tokens; a step feeds {settings.token_budget}"
    table = Table("what", "how much", title=title, show_header=False, caption=f"The record ends: {end}.")
    table.columns[1].justify = "right"
    for name, value in asdict(figures).items():
        if value or name not in ("refused", "left_out"):
            table.add_row(_LABELS[name], _written(name, value))
    Console(highlight=False).print(table)


def _written(name: str, value: float) -> str:
    if name in _SHARES:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
