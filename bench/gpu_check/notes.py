"""Results of a part as lines of JSON: each is written at once, so that a later failure loses none."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TextIO

from bench.report.results import Row, row

_LEVELS = 50  # of lists and objects in a value; values of the parts have some


class Notes:
    """Writes rows, the values that they were made from, and failures."""

    def __init__(self, file: TextIO, suffix: str = "") -> None:
        """All names end with the suffix."""
        self._file = file
        self._suffix = suffix

    def suffixed(self, suffix: str) -> "Notes":
        """Return the notes of the same measurements under other conditions."""
        return Notes(self._file, self._suffix + suffix)

    def row(self, metric: str, value: float | None, unit: str, peer: str | None = None) -> None:
        """Write a row; None marks a value that could not be measured."""
        self._write("row", asdict(row("gpu", metric + self._suffix, value, unit, peer)))

    def raw(self, name: str, values: Any) -> None:
        """Write the values of every repetition."""
        self._write("raw", [name + self._suffix, values])

    @contextmanager
    def kept(self, what: str) -> Iterator[None]:
        """Record a failure, and continue with the next measurement."""
        try:
            yield
        except Exception as failure:
            reason = f"{type(failure).__name__}: {failure}"
            self._write("failure", [what + self._suffix, reason])
            print(f"{what}{self._suffix} failed: {reason}", flush=True)

    def _write(self, kind: str, value: Any) -> None:
        self._file.write(json.dumps({kind: value}) + "\n")
        self._file.flush()


class Result:
    """The results so far."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.raw: dict[str, Any] = {}
        self.failures: dict[str, str] = {}

    def take(self, line: str) -> None:
        """Add a line of a part's notes. A truncated line is ignored; any other that is no note is a failure."""
        if not line.endswith("\n"):
            return
        try:
            ((kind, value),) = json.loads(line).items()
            self._add(kind, value)
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError):
            self.failures["notes"] = f"this is no note: {line[:80]!r}"

    def _add(self, kind: str, value: Any) -> None:
        if kind == "row":
            self.rows.append(_checked(Row(**value)))
            return
        name, content = value
        if kind == "raw":
            self.raw[_in_one_line(name)] = _shallow(content)
        else:
            self.failures[_in_one_line(name)] = _text(content)


def _checked(found: Row) -> Row:
    """Return a row of these values. Raises TypeError or OverflowError for those that are none."""
    peer = None if found.peer is None else _text(found.peer)
    if isinstance(found.value, bool) or not isinstance(found.value, float | int | None):
        raise TypeError("a value is a number or None")
    if found.value is not None:
        float(found.value)
    return row("gpu", _in_one_line(found.metric), found.value, _text(found.unit), peer)


def _in_one_line(name: object) -> str:
    return " ".join(_text(name).split())


def _text(found: object) -> str:
    if not isinstance(found, str):
        raise TypeError("a name, a unit or a reason is text")
    return found


def _shallow(value: Any, levels: int = _LEVELS) -> Any:
    """Return a value that can be written as JSON. Raises RecursionError if it is nested too deeply."""
    if isinstance(value, dict | list):
        if levels == 0:
            raise RecursionError("nested too deeply")
        for one in value.values() if isinstance(value, dict) else value:
            _shallow(one, levels - 1)
    return value
