"""The generated blocks of docs/papers.md: our values beside the papers', and the pictures of the figures."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.papers.figures import all_figures
from bench.papers.picture import path_of
from bench.papers.results import LARGE_DEVIATION, read
from bench.report.targets import RESULTS

Rows = Iterable[Mapping[str, Any]]


def table(results: Path = RESULTS) -> str:
    """Return a table with a line for each figure: ours, the paper's, the deviation; large ones are bold."""
    try:
        found = read(results)
    except FileNotFoundError:
        return "(Not computed yet: `make papers`.)"
    lines = [_origin(found), "", "| figure | ours / the paper's (deviation) | |", "|---|---|---|"]
    compared = [row for row in found["rows"] if row["paper"] is not None]
    for figure, rows in groupby(compared, key=lambda row: row["figure"]):
        of_figure = list(rows)
        kinds = ", ".join(dict.fromkeys(row["kind"] for row in of_figure))
        lines.append(f"| {name_of(figure)} | {'; '.join(map(_compared, of_figure))} | {kinds} |")
    return "\n".join(lines)


def pictures() -> str:
    """Return the pictures of all figures that are drawn."""
    shown = [(figure, path_of(figure)) for figure in all_figures() if figure.panels[0]]
    return "\n".join(f"![{figure.seen}](docs/images/{path.name})" for figure, path in shown if path.exists())


def name_of(figure: str) -> str:
    """Return a figure's name for readers: `figure_12` is 12, `flex_figure_3` is Flex 3."""
    words = figure.replace("flex_", "Flex ").replace("figure_", "").replace("_", " ")
    return words[0].upper() + words[1:]


def large_deviations(rows: Rows) -> dict[str, list[str]]:
    """Return the metrics that deviate by more than 10 % from the paper's, by figure."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["deviation"] is not None and abs(row["deviation"]) > LARGE_DEVIATION:
            found.setdefault(row["figure"], []).append(row["metric"])
    return found


def _origin(found: Mapping[str, Any]) -> str:
    """Return where the rows are from: the latest run, and for rows of earlier ones their kinds."""
    hardware, earlier = found["hardware"], [row for row in found["rows"] if "day" in row]
    text = (
        f"[bench/results/papers.json](bench/results/papers.json) has all rows; {found['commit']}, "
        f"{found['started'][:10]}, {hardware['cores']} cores of {hardware['cpu']} ({hardware['device']})."
    )
    runs = {(row["commit"], row["day"], row["cpu"]): None for row in earlier}
    for commit, day, cpu in runs:
        kinds = dict.fromkeys(row["kind"] for row in earlier if row["commit"] == commit)
        figures = dict.fromkeys(name_of(row["figure"]) for row in earlier if row["commit"] == commit)
        text += f" Earlier, {' and '.join(kinds)}: {', '.join(figures)} ({commit}, {day}, {cpu})."
    return text


def _compared(row: Mapping[str, Any]) -> str:
    metric = row["metric"].removeprefix(f"{row['figure']}_").replace("_", " ").removesuffix(" ratio")
    deviation = "" if row["deviation"] is None else f" ({row['deviation']:+.1%})"
    text = f"{_text(row['value'], row['unit'])} / {_text(row['paper'], row['unit'])}{deviation}"
    large = row["deviation"] is not None and abs(row["deviation"]) > LARGE_DEVIATION
    return f"{metric} {f'**{text}**' if large else text}"


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.3g} %" if unit == "share" else f"{value:.4g}"
