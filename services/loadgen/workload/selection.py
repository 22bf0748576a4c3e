"""Selection of a file's rows: skipped rows, cut or scaled lengths, copies of sessions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.loadgen.workload.rows import Row


class InvalidSelection(Exception):
    """The selection is empty, or does not fit the file."""


@dataclass(frozen=True)
class Selection:
    """Operations on rows, in this order. None: not applied.

    `limit` takes the first rows. `mean_input` and `mean_output` scale the lengths to these means, in tokens.
    `cap_input` and `cap_output` cut longer lengths. `max_input`, `max_output` and `max_total` (both together, as a
    model's context) skip rows with more tokens.
    """

    limit: int | None = None
    mean_input: float | None = None
    mean_output: float | None = None
    cap_input: int | None = None
    cap_output: int | None = None
    max_input: int | None = None
    max_output: int | None = None
    max_total: int | None = None


def select(rows: Sequence[Row], selection: Selection) -> list[Row]:
    """Apply a selection. Raises InvalidSelection."""
    taken = _scaled(rows[: selection.limit], selection)
    chosen = [row for row in (_cut(row, selection) for row in taken) if _fits(row, selection)]
    if not chosen:
        raise InvalidSelection("no row is left of the workload: see --max-input, --max-output and the model's context")
    return chosen


def describe(rows: Sequence[Row], chosen: Sequence[Row], selection: Selection) -> dict[str, Any]:
    """Return the applied operations, for a report."""
    given = {name: value for name, value in vars(selection).items() if value is not None}
    taken = len(rows[: selection.limit])
    return {"file_rows": len(rows), "rows": len(chosen), "rows_left_out": taken - len(chosen), **given}


def _scaled(rows: Sequence[Row], selection: Selection) -> Sequence[Row]:
    if selection.mean_input is None and selection.mean_output is None:
        return rows
    if selection.mean_input is not None and any(row.blocks for row in rows):
        raise InvalidSelection("the prompts of a trace with blocks cannot be scaled: --cap-input cuts them")
    inputs = _factor([row.input_tokens for row in rows], selection.mean_input)
    outputs = _factor([row.output_tokens for row in rows], selection.mean_output)
    return [
        replace(
            row,
            input_tokens=max(1, round(row.input_tokens * inputs)),
            output_tokens=max(1, round(row.output_tokens * outputs)),
        )
        for row in rows
    ]


def _factor(lengths: Sequence[int], mean: float | None) -> float:
    return 1.0 if mean is None else mean * len(lengths) / sum(lengths)


def _cut(row: Row, selection: Selection) -> Row:
    return replace(
        row,
        input_tokens=min(row.input_tokens, selection.cap_input or row.input_tokens),
        output_tokens=min(row.output_tokens, selection.cap_output or row.output_tokens),
    )


def _fits(row: Row, selection: Selection) -> bool:
    lengths = (
        (row.input_tokens, selection.max_input),
        (row.output_tokens, selection.max_output),
        (row.input_tokens + row.output_tokens, selection.max_total),
    )
    return all(most is None or tokens <= most for tokens, most in lengths)
