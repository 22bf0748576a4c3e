"""Workloads: sessions of calls, each with the pieces of its prompt and the length of its output."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from services.loadgen.workload import rows, selection
from services.loadgen.workload.lengths import Lengths
from services.loadgen.workload.prompts import Kind, Piece, Prompt, length
from services.loadgen.workload.rows import Row
from services.loadgen.workload.selection import Selection

# Sub-seeds of independent draws from one seed.
_LENGTHS = 0


@dataclass(frozen=True)
class Call:
    """One request. `offset_seconds` is its earliest time after the start of its session."""

    prompt: Prompt
    output_tokens: int
    offset_seconds: float = 0.0

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt."""
        return length(self.prompt)


@dataclass(frozen=True)
class Session:
    """Calls that run in sequence. `start_seconds` is its start in the trace."""

    calls: tuple[Call, ...]
    start_seconds: float = 0.0


class Workload(Protocol):
    """Sessions, the same at each iteration. Can be sent to another process."""

    @property
    def has_times(self) -> bool:
        """Whether sessions have the times of a trace."""
        ...

    def sessions(self) -> Iterator[Session]:
        """Yield the sessions, endlessly if the workload has no bound."""
        ...

    def as_json(self) -> dict[str, Any]:
        """Return the workload for a report."""
        ...


@dataclass(frozen=True)
class RandomLengths:
    """Endless requests with random lengths.

    Each prompt begins with one of `prefixes` prefixes of `prefix_tokens` tokens, which precede those drawn from
    `input`.
    """

    input: Lengths
    output: Lengths
    seed: int = 0
    prefix_tokens: int = 0
    prefixes: int = 1

    @property
    def has_times(self) -> bool:
        """Always False."""
        return False

    def sessions(self) -> Iterator[Session]:
        """Yield a session of one call for each request."""
        draw = np.random.default_rng([_LENGTHS, self.seed])
        for number in count():
            own = Piece((Kind.UNIQUE, number), self.input.draw(draw))
            shared = Piece((Kind.PREFIX, int(draw.integers(self.prefixes))), self.prefix_tokens)
            yield Session((Call((shared, own) if self.prefix_tokens else (own,), self.output.draw(draw)),))

    def as_json(self) -> dict[str, Any]:
        """Return the workload for a report."""
        shared = {"prefix_tokens": self.prefix_tokens, "prefixes": self.prefixes} if self.prefix_tokens else {}
        return {"kind": "random", "input": str(self.input), "output": str(self.output), **shared}


@dataclass(frozen=True)
class Recorded:
    """The requests of a file, in its order.

    Each of `copies` copies of a session has its own first block, so copies share nothing.
    """

    path: Path
    selection: Selection = field(default_factory=Selection)
    copies: int = 1

    @property
    def has_times(self) -> bool:
        """Whether the file has times."""
        return rows.read(self.path)[0].seconds is not None

    def sessions(self) -> Iterator[Session]:
        """Yield the sessions, one copy of all after another. Raises InvalidFile and InvalidSelection."""
        chosen = selection.select(rows.read(self.path), self.selection)
        numbers = count()
        for copy in range(self.copies):
            for one in _by_session(chosen):
                yield _session(one, copy, numbers)

    def as_json(self) -> dict[str, Any]:
        """Return its description, with skipped, cut and scaled rows."""
        read = rows.read(self.path)
        chosen = selection.select(read, self.selection)
        copies = {"copies": self.copies} if self.copies > 1 else {}
        return {
            "kind": "recorded",
            "file": self.path.name,
            **selection.describe(read, chosen, self.selection),
            **copies,
        }


def _by_session(chosen: Sequence[Row]) -> Iterator[list[Row]]:
    """Group calls by session, in order of their times; a row without a session is its own session."""
    sessions: dict[int, list[Row]] = {}
    for row in chosen:
        if row.session is None:
            yield [row]
        else:
            sessions.setdefault(row.session, []).append(row)
    for one in sessions.values():
        yield sorted(one, key=lambda row: row.seconds or 0.0)


def _session(calls: Sequence[Row], copy: int, numbers: Iterator[int]) -> Session:
    made = [(row, _prompt(row, copy, next(numbers)), row.seconds or 0.0) for row in calls]
    if calls[0].session is None:
        row, prompt, seconds = made[0]
        return Session((Call(prompt, row.output_tokens),), seconds)
    return Session(tuple(Call(prompt, row.output_tokens, seconds) for row, prompt, seconds in made))


def _prompt(row: Row, copy: int, number: int) -> Prompt:
    """Make a piece of each whole block; the remaining tokens are unique to the prompt."""
    whole = min(len(row.blocks), row.input_tokens // row.block_tokens) if row.block_tokens else 0
    pieces = [Piece((Kind.BLOCK, one), row.block_tokens) for one in row.blocks[:whole]]
    if copy and pieces:
        pieces[0] = Piece((*pieces[0].name, copy), row.block_tokens)
    if rest := row.input_tokens - whole * row.block_tokens:
        pieces.append(Piece((Kind.UNIQUE, number), rest))
    return tuple(pieces)
