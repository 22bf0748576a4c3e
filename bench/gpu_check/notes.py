"""Results of a part as lines of JSON: each is written at once, so that a later failure loses none."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TextIO

from bench.report.results import Row, row


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
            print(f"{what}{self._suffix} failed: {reason}", flush=True)
            self._write("failure", [what + self._suffix, reason])

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
        except (ValueError, TypeError, AttributeError, KeyError, IndexError):
            self.failures["notes"] = f"this is no note: {line[:80]!r}"

    def _add(self, kind: str, value: Any) -> None:
        if kind == "row":
            self.rows.append(Row(**value))
        elif kind == "raw":
            self.raw[value[0]] = value[1]
        else:
            self.failures[value[0]] = value[1]
