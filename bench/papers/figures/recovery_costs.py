"""Figure 19a of PagedAttention: bringing a preempted sequence back by recomputation and by swapping, on the CPU."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bench.papers.case import Case, Values
from bench.papers.figure import Figure
from bench.papers.measured import recovery
from bench.papers.measured.ratios import MILLI, times_as_long
from bench.papers.rows import Kind, PaperRow, paper_row, paper_value
from bench.report.picture import GREY, OTHER, PEER, QUIRE, TARGET

_CASE = "figure_19a_recovery"
_BLOCK_SIZES = tuple(2**power for power in range(9))
_TOGETHER = 3  # block sizes of one case: each has a model of its own in memory
_COMPARED = {  # name, style and colour of each line
    "recompute": ("recompute", "o-", QUIRE),
    "swap": ("swap out and in", "o-", PEER),
    "swap_out": ("swap out", "^--", OTHER),
    "swap_in": ("swap in", "v--", GREY),
}

Seconds = Mapping[str, Sequence[float]]


def _cases(quick: bool) -> list[Case]:
    sizes, tokens, repetitions = ((1, 16, 256), 64, 1) if quick else (_BLOCK_SIZES, 1024, 4)
    groups = [list(sizes[first : first + _TOGETHER]) for first in range(0, len(sizes), _TOGETHER)]
    more = {"tokens": tokens, "repetitions": repetitions}
    return [
        Case(f"{_CASE}_{group[0]}", recovery.recovery_seconds, {"block_sizes": group, **more}, timed=True)
        for group in groups
    ]


def _rows(values: Mapping[str, Values]) -> list[PaperRow]:
    sizes = _with_sums(values)
    found = [
        _row(f"{way}_{size}_ms", round(median(seconds[way]) / MILLI, 3), "ms")
        for size, seconds in sizes.items()
        for way in _COMPARED
    ]
    ratios = {size: _over_swap(seconds) for size, seconds in sizes.items()}
    found += [_row(f"recompute_over_swap_{size}_ratio", ratio, "ratio") for size, ratio in ratios.items()]
    found.append(_row("highest_recompute_over_swap_ratio", max(ratios.values()), "ratio"))
    recomputed = [median(seconds["recompute"]) for seconds in sizes.values()]
    found.append(_row("recompute_highest_over_lowest_ratio", round(max(recomputed) / min(recomputed), 3), "ratio"))
    growth = median(sizes["1"]["swap"]) / median(sizes["256"]["swap"])
    return [*found, _row("swap_1_over_256_ratio", round(growth, 3), "ratio")]


def _row(metric: str, value: float, unit: str) -> PaperRow:
    return paper_row("figure_19a", metric, value, unit, Kind.MEASURED)


def _with_sums(values: Mapping[str, Values]) -> dict[str, dict[str, Sequence[float]]]:
    """Return the seconds by block size, with `swap`: out and in of the same repetition."""
    found: dict[str, Seconds] = {}
    for name, of_case in values.items():
        if name.startswith(_CASE):
            found |= of_case["seconds"]
    return {size: {**found[size], "swap": _both(found[size])} for size in sorted(found, key=int)}


def _tokens(values: Mapping[str, Values]) -> int:
    tokens: int = next(of_case["tokens"] for name, of_case in values.items() if name.startswith(_CASE))
    return tokens


def _both(seconds: Seconds) -> list[float]:
    return [out + back for out, back in zip(seconds["swap_out"], seconds["swap_in"], strict=True)]


def _over_swap(seconds: Seconds) -> float:
    return times_as_long(seconds["recompute"], seconds["swap"])


def _draw(panels: Sequence[Any], values: Mapping[str, Values]) -> None:
    """Lines of milliseconds by block size, and of recomputation over swapping with the paper's marks."""
    (left, right), sizes = panels, _with_sums(values)
    places = [int(size) for size in sizes]
    for way, (text, style, color) in _COMPARED.items():
        heights = [median(seconds[way]) / MILLI for seconds in sizes.values()]
        left.plot(places, heights, style, color=color, label=text)
    ratios = [_over_swap(seconds) for seconds in sizes.values()]
    right.plot(places, ratios, "o-", color=QUIRE, label="recompute over swap out and in, here")
    marks = {size: paper_value("figure_19a", f"recompute_over_swap_{size}_ratio") for size in _BLOCK_SIZES}
    known = {size: mark for size, mark in marks.items() if mark is not None}
    right.plot(list(known), list(known.values()), "D", color=TARGET, label="paper, over PCIe")
    most = paper_value("figure_19a", "highest_recompute_over_swap_ratio")
    right.axhline(most, color=TARGET, linestyle="--", linewidth=1.3, label=f"paper: never above {most}")
    left.set_ylabel(f"milliseconds for {_tokens(values):,} tokens")
    right.set_ylabel("recomputation over swapping")
    for axes in panels:
        _label(axes)


def _label(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(_BLOCK_SIZES, [str(size) for size in _BLOCK_SIZES])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens per block")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.45)
    axes.legend(loc="upper left", fontsize=7.5)


FIGURES = (
    Figure(
        "figure_19a",
        "Figure 19a: recomputation and swapping of one sequence by block size (CPU)",
        _cases,
        _rows,
        _draw,
        (1, 2),
        (11, 3.8),
        "Milliseconds of recomputing, swapping out and swapping in by block size, and their ratio beside the paper's",
    ),
)
