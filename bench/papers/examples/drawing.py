"""Block tables and pools as monospaced text, with the words of sequences in the slots of blocks."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from textwrap import dedent

from bench.papers.examples.decoding import Moment
from bench.papers.examples.sharing import BeamStep
from bench.papers.examples.word_pool import Mapped, Snapshot
from kvmanager import BlockState

_GAP = "    "
_EMPTY = "."


def table_with_pool(state: Snapshot, kind: str = "request") -> str:
    """Draw logical blocks, block tables and all blocks of the pool side by side, as the paper's Figure 6 does."""
    left = [line for name, table in state.tables.items() for line in _logical_blocks(f"{kind} {name}", table)]
    right = [["block", "slots"], *_pool(state, state.pool, counted=False)]
    return fenced(_beside(_aligned(left), _aligned(right)))


def moments(frames: Iterable[Moment]) -> str:
    """Draw block tables, and the held blocks of the pool with their reference counts, at each moment."""
    lines = [line for frame in frames for line in ([], *_moment(frame))]
    drawn = _aligned([["", "block (filled)", "block", "", "slots"], *lines[1:]])
    return fenced(dedent("\n".join(drawn)).split("\n"))  # no moment needs to have an event


def beams(step: BeamStep, after: Mapping[str, str]) -> str:
    """Draw the tables of candidates and all reference counts before and after a step; `after` labels the new ones."""
    old = [[f"candidate {name}", *map(str, step.before.ids(name))] for name in sorted(step.before.tables)]
    new = [[label, *map(str, step.after.ids(name))] for name, label in after.items()]
    shown = list(step.before.pool)
    counts = [[text, *_counts(state, shown)] for text, state in (("before", step.before), ("after", step.after))]
    tables = _beside(["before", *_aligned(old)], ["after", *_aligned(new)])
    return fenced([*tables, "", *_aligned([["references of block", *map(str, shown)], *counts])])


def entries(table: Iterable[Mapped]) -> str:
    """Return a block table as text: each block with the number of its filled slots."""
    return " ".join(f"{entry.block}({entry.filled})" for entry in table)


def fenced(lines: Iterable[str]) -> str:
    """Return lines as a Markdown block of monospaced text."""
    return "\n".join(["```", *lines, "```"])


def _logical_blocks(title: str, table: Sequence[Mapped]) -> Iterable[list[str]]:
    yield [title, "", "block", "filled"]
    for index, entry in enumerate(table):
        yield [f"  logical {index}", " ".join(entry.words), str(entry.block), str(entry.filled)]


def _moment(frame: Moment) -> Iterable[list[str]]:
    copies = [f"  copied: {copy.source} to {copy.destination}" for copy in frame.state.copies]
    tables = [f"{name}: {entries(table)}" for name, table in frame.state.tables.items()]
    held = [one for one, block in frame.state.pool.items() if block.state is BlockState.HELD]
    pool = _pool(frame.state, held, counted=True)
    for event, table, line in zip_longest([frame.event, *copies], tables, pool, fillvalue=None):
        yield [event or "", table or "", *(line or ())]


def _pool(state: Snapshot, blocks: Iterable[int], *, counted: bool) -> Iterable[list[str]]:
    for one in blocks:
        block = state.pool[one]
        words = block.words if block.state is BlockState.HELD else [""] * len(block.words)
        yield [str(one), *([f"x{block.references}"] if counted else []), *(word or _EMPTY for word in words)]


def _counts(state: Snapshot, blocks: Iterable[int]) -> list[str]:
    return [str(count) if count else _EMPTY for count in state.references(*blocks)]


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of cells as columns; those with numbers are aligned to the right."""
    columns = [_column(column) for column in zip_longest(*lines, fillvalue="")]
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def _column(cells: Sequence[str]) -> list[str]:
    width, numbers = max(map(len, cells)), any(map(str.isdecimal, cells))
    return [cell.rjust(width) if numbers else cell.ljust(width) for cell in cells]


def _beside(left: Sequence[str], right: Sequence[str]) -> list[str]:
    width = max(map(len, left))
    pairs = zip_longest(left, right, fillvalue="")
    return [f"{one.ljust(width)}{_GAP}{other}".rstrip() for one, other in pairs]
