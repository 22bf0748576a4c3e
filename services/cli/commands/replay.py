"""`quire replay`: replays a record, and prints the result."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine.run.record import RecordSettings
from kvmanager.errors import InvalidRegistration
from kvmanager.history.record import OperationsReplay, ReplayMismatch
from services.cli.commands.replay_requests import Figures, RequestsReplay
from services.wire.records import operations, requests
from services.wire.records.reader import InvalidRecord, RecordReader

_SHARES = ("hit_rate", "waste")

# Numbers shown of a list; of tokens only the count is shown.
_MOST_NUMBERS = 16
_TOKENS = "token_ids"


@dataclass(frozen=True)
class Options:
    """The given options of the command line; None and False for the others."""

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


def replay(file: str, options: Options, as_json: bool) -> int:
    """Replay a record of either kind; return 0, or 1 after reporting in one line where it differs or why it is invalid.

    Raises click.UsageError, naming the option, if an option does not fit the record.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        with Path(file).open("rb") as opened, _progress(errors) as progress:
            reader = RecordReader(opened)
            match reader.header.format:
                case operations.OPERATIONS_FORMAT:
                    size = os.fstat(opened.fileno()).st_size
                    return _replay_operations(reader, options, as_json, lambda: progress(reader.bytes_read, size))
                case requests.REQUESTS_FORMAT:
                    return _replay_requests(reader, options, as_json, progress)
                case other:
                    raise InvalidRecord(f"its format is {other!r}, which this version does not support")
    except BrokenPipeError:  # of the output, such as `| head`: click ends the command
        raise
    except (OSError, InvalidRecord) as error:
        errors.print(f"{file} cannot be replayed: {error}", style="red", markup=False)
        return 1


def print_record(file: str) -> int:
    """Print a record for people, a line for each entry; return 0, or 1 after saying why it cannot be read."""
    try:
        with Path(file).open("rb") as opened:
            for line in lines(RecordReader(opened)):
                click.echo(line)
    except BrokenPipeError:  # as above
        raise
    except (OSError, InvalidRecord) as error:
        click.echo(f"{file} cannot be read: {error}", err=True)
        return 1
    return 0


_Advance = Callable[[float, float], None]


@contextmanager
def _progress(console: Console) -> Iterator[_Advance]:
    """Show a progress bar on a terminal."""
    columns = (TextColumn("Replaying"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("")
        yield lambda done, total: progress.update(task, completed=done, total=total)


# Operations.


def _replay_operations(reader: RecordReader, options: Options, as_json: bool, advance: Callable[[], None]) -> int:
    if given := options.given():
        raise click.UsageError(f"{given[0]} is for a record of requests; this one is of operations")
    replayed, parted = operations.begin_replay(reader), None
    try:
        for _ in operations.run_replay(reader, replayed):
            advance()
    except ReplayMismatch as error:
        parted = error
    _show_operations(replayed, parted, reader.end_reason, as_json)
    return 0 if parted is None else 1


def _show_operations(replayed: OperationsReplay, parted: ReplayMismatch | None, end: str, as_json: bool) -> None:
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
        click.echo(f"The replay differs after {replayed.steps} steps: {parted}.")
    else:
        click.echo(f"The checksum is right: {replayed.steps} steps, {replayed.checksum}. The record ends: {end}.")


# Requests.


def _replay_requests(reader: RecordReader, options: Options, as_json: bool, progress: _Advance) -> int:
    recorded, found = requests.settings_of(reader), list(requests.requests_of(reader))
    settings = _settings(recorded, options)
    try:
        run = RequestsReplay(
            settings,
            found,
            recorded.block_size,
            prefix_cache=not options.no_prefix_cache,
        )
    except (ValueError, InvalidRegistration) as error:
        raise click.UsageError(str(error)) from error
    figures = run.run(lambda ended: progress(ended, len(found)))
    _show_requests(figures, settings, reader.end_reason, as_json)
    return 0


def _settings(recorded: RecordSettings, options: Options) -> RecordSettings:
    """Return the recorded settings with the given options; for another block size, the same memory in blocks."""
    size = options.block_size or recorded.block_size
    same_memory = max(1, recorded.device_blocks * recorded.block_size // size)
    given = {name: value for name, value in asdict(options).items() if value is not None}
    del given["no_prefix_cache"]
    return replace(recorded, **{"device_blocks": same_memory} | given)


def _show_requests(figures: Figures, settings: RecordSettings, end: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"kind": "requests", "settings": asdict(settings), **asdict(figures), "end": end}))
        return
    blocks = f"{settings.device_blocks} blocks of {settings.block_size} tokens"
    title = f"{blocks}; at most {settings.token_budget} tokens a step"
    table = Table("what", "how much", title=title, show_header=False, caption=f"The record ends: {end}.")
    table.columns[1].justify = "right"
    for figure in fields(figures):
        value = getattr(figures, figure.name)
        if value or figure.name not in ("refused", "left_out"):
            table.add_row(figure.metadata["label"], _written(figure.name, value))
    Console(highlight=False).print(table)


def _written(name: str, value: float) -> str:
    if name in _SHARES:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def lines(reader: RecordReader) -> Iterator[str]:
    """Yield a line for the header, then one for each entry. Raises InvalidRecord."""
    yield f"1 header {_fields(reader.header)}"
    for entry in reader:
        kind = entry.WhichOneof("kind")
        checksum = f" checksum={entry.checksum.hex()}" if entry.checksum else ""
        yield f"{reader.entries} {kind} {_fields(getattr(entry, str(kind)))}{checksum}"
    yield f"The record ends: {reader.end_reason}."


def _fields(message: Message) -> str:
    return " ".join(_field(known, value) for known, value in message.ListFields())


def _field(known: FieldDescriptor, value: Any) -> str:
    if not known.is_repeated:
        return f"{known.name}={_value(known, value)}"
    if known.name == _TOKENS or (known.message_type is None and len(value) > _MOST_NUMBERS):
        return f"{known.name}=({len(value)} in all)"
    return f"{known.name}=[{', '.join(_value(known, one) for one in value)}]"


def _value(known: FieldDescriptor, value: Any) -> str:
    if known.message_type is not None:
        return f"{{{_fields(value)}}}"
    if known.enum_type is not None:
        return known.enum_type.values_by_number[value].name if value in known.enum_type.values_by_number else str(value)
    if isinstance(value, bytes):
        return value.hex() if len(value) <= _MOST_NUMBERS else f"({len(value)} bytes)"
    return repr(value)
