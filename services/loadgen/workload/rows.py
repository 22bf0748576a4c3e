"""Files of recorded requests, read as rows: lengths and, if the file has them, times, sessions and shared blocks."""

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple


class InvalidFile(Exception):
    """A file that cannot be read as requests."""


@dataclass(frozen=True)
class Row:
    """A recorded request.

    `seconds` is its arrival, since the first row of the file or since the start of its session if it has one. Each id
    in `blocks` stands for `block_tokens` tokens: prompts with equal first ids share these tokens.
    """

    input_tokens: int
    output_tokens: int
    seconds: float | None = None
    session: int | None = None
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0


class Columns(NamedTuple):
    """Names of a CSV file's columns; the defaults are those of common files."""

    input: str
    output: str
    time: str | None = None


COLUMNS = (
    Columns("num_prefill_tokens", "num_decode_tokens"),
    Columns("prompt_tokens", "output_tokens"),
    Columns("ContextTokens", "GeneratedTokens", "TIMESTAMP"),
)
MOONCAKE_BLOCK_TOKENS = 512
SESSION_BLOCK_TOKENS = 16
MAX_TOKENS = (1 << 31) - 1


def read(path: Path) -> list[Row]:
    """Read a `.csv` of lengths, or a `.jsonl` trace with blocks. Raises InvalidFile."""
    formats: dict[str, Callable[[Path], list[Row]]] = {".csv": _csv, ".jsonl": _jsonl}
    reader = formats.get(path.suffix)
    if reader is None:
        raise InvalidFile(f"{path} must end with .csv or .jsonl")
    try:
        rows = reader(path)
    except OSError as error:
        raise InvalidFile(f"{path}: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise InvalidFile(f"{path}: {error}") from error
    if not rows:
        raise InvalidFile(f"{path} has no rows")
    return rows


def _csv(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        columns = _columns(reader.fieldnames or ())
        lines = ((reader.line_num, line) for line in reader)
        return _since_the_first(_each(lambda line: _length_row(line, columns), lines))


def _columns(names: Sequence[str]) -> Columns:
    found = next((one for one in COLUMNS if {one.input, one.output} <= set(names)), None)
    if found is None:
        known = "; ".join(f"{one.input},{one.output}" for one in COLUMNS)
        raise ValueError(f"the columns must be {known}, not {','.join(names)}")
    return found


def _length_row(line: Mapping[str, str], columns: Columns) -> Row:
    time = line.get(columns.time) if columns.time else None
    seconds = datetime.fromisoformat(time).timestamp() if time else None
    return Row(_tokens(line, columns.input), _tokens(line, columns.output), seconds)


def _jsonl(path: Path) -> list[Row]:
    lines = [(number, line) for number, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
    rows = _each(lambda line: _trace_row(json.loads(line)), lines)
    return rows if rows and rows[0].session is not None else _since_the_first(rows)


def _each(read_line: Callable[[Any], Row], lines: Iterable[tuple[int, Any]]) -> list[Row]:
    """Read numbered lines. Raises ValueError with the number of an invalid one."""
    rows = []
    for number, line in lines:
        try:
            rows.append(read_line(line))
        except KeyError as error:
            raise ValueError(f"line {number} has no field {error.args[0]}") from error
        except ValueError as error:
            raise ValueError(f"line {number} is invalid: {error}") from error
    return rows


def _trace_row(line: Any) -> Row:
    if not isinstance(line, dict):
        raise ValueError(f"a row must be a JSON object, not {line!r:.60}")
    return _session_row(line) if "session" in line else _mooncake_row(line)


def _mooncake_row(line: Mapping[str, Any]) -> Row:
    lengths = _tokens(line, "input_length"), _tokens(line, "output_length")
    return Row(*lengths, _seconds(line, "timestamp"), None, _ids(line, "hash_ids"), MOONCAKE_BLOCK_TOKENS)


def _session_row(line: Mapping[str, Any]) -> Row:
    lengths = _tokens(line, "input_length"), _tokens(line, "output_length")
    session = line["session"]
    if not isinstance(session, int):
        raise ValueError(f"session must be an integer, not {session!r:.60}")
    return Row(*lengths, _seconds(line, "timestamp_ms"), session, _ids(line, "block_ids"), SESSION_BLOCK_TOKENS)


def _since_the_first(rows: Iterable[Row]) -> list[Row]:
    """Sort rows by time, and let the times start at 0."""
    read = list(rows)
    if any(row.seconds is None for row in read):
        return read
    first = min((row.seconds or 0.0 for row in read), default=0.0)
    return sorted(
        (replace(row, seconds=(row.seconds or 0.0) - first) for row in read), key=lambda row: row.seconds or 0
    )


def _tokens(line: Mapping[str, Any], name: str) -> int:
    """Read a length; a row without output requests one token."""
    value = line[name]
    try:
        tokens = int(value)
    except (ValueError, TypeError, OverflowError):
        tokens = -1
    if not 0 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{name} must be between 0 and {MAX_TOKENS} tokens, not {value!r:.60}")
    return max(1, tokens)


def _seconds(line: Mapping[str, Any], name: str) -> float:
    """Read a time in milliseconds."""
    value = line[name]
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number of milliseconds, not {value!r:.60}")
    return value / 1000


def _ids(line: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = line[name]
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ValueError(f"{name} must be a list of integers, not {values!r:.60}")
    return tuple(values)
