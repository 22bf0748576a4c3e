"""Memory of long contexts, as in Figures 1 and 2 of FlexAttention and its bound on overhead; see long_contexts."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from bench.papers.case import Case, Values
from bench.papers.figure import Figure
from bench.papers.measured.mixed_lengths import granted_slots
from bench.papers.measured.peak_memory import default_peak, paged_peak
from bench.papers.rows import Kind, PaperRow, paper_row, paper_value
from bench.report.picture import GREY, OTHER, PEER, QUIRE, TARGET

_MIB = 1024 * 1024
_FIGURE_1, _FIGURE_2, _OVERHEAD = "flex_figure_1", "flex_figure_2", "flex_memory_overhead"
_WAYS = {"paged": ("in blocks", QUIRE), "default": ("transformers' default", PEER)}
_MIXES = {"mixed": "256, 512, ..., 4,096", "any": "any of 256 to 4,096"}
_NEEDED = {"of_tokens": "over computed tokens", "of_sequences": "over whole running prompts"}

Cases = Mapping[str, Values]


def _cases_1(quick: bool) -> list[Case]:
    lengths = (128,) if quick else (128, 256, 512, 1024, 2048, 4096)
    return [Case(f"{_FIGURE_1}_{length}", paged_peak, {"length": length}, timed=True) for length in lengths]


def _by_length(prefix: str, values: Cases) -> Iterator[tuple[int, Values]]:
    """Yield the cases whose names are a prefix and a length."""
    for name, case in values.items():
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal():
            yield int(name.removeprefix(prefix)), case


def _mib(byte_count: float) -> float:
    return round(byte_count / _MIB, 2)


def _increment(case: Values) -> int:
    """Return the bytes at the peak beyond the warm model's."""
    increment: int = case["peak_bytes"] - case["model_bytes"]
    return increment


def _rows_1(values: Cases) -> list[PaperRow]:
    found = []
    for length, case in _by_length(f"{_FIGURE_1}_", values):
        found += [
            _row(_FIGURE_1, f"peak_{length}_mib", _mib(case["peak_bytes"]), "MiB"),
            _row(_FIGURE_1, f"incremental_{length}_mib", _mib(_increment(case)), "MiB"),
            _row(_FIGURE_1, f"kv_{length}_mib", _mib(case["kv_bytes"]), "MiB"),
            _row(_FIGURE_1, f"kv_{length}_share", round(case["kv_bytes"] / case["peak_bytes"], 4), "share"),
        ]
    return found


def _row(figure: str, metric: str, value: float, unit: str) -> PaperRow:
    return paper_row(figure, metric, value, unit, Kind.MEASURED)


def _draw_1(panels: Sequence[Any], values: Cases) -> None:
    """Stacked bars of the peak by length: model, blocks, and the rest; again without the model."""
    cases = dict(_by_length(f"{_FIGURE_1}_", values))
    blocks = [_mib(case["kv_bytes"]) for case in cases.values()]
    rest = [max(0.0, _mib(_increment(case) - case["kv_bytes"])) for case in cases.values()]
    model = [_mib(case["model_bytes"]) for case in cases.values()]
    parts = (("model and libraries", model, GREY), ("blocks held", blocks, QUIRE), ("activations", rest, OTHER))
    for axes, shown in ((panels[0], parts), (panels[1], parts[1:])):
        bottoms = [0.0] * len(cases)
        for text, heights, color in shown:
            axes.bar(range(len(cases)), heights, 0.6, bottom=bottoms, color=color, label=text)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        _label(axes, list(cases), max(bottoms))
    if case := cases.get(2048):
        share, mark = case["kv_bytes"] / case["peak_bytes"], paper_value(_FIGURE_1, "kv_2048_share")
        panels[0].set_title(f"K and V at 2,048 tokens: {share:.1%} of the peak; paper: about {mark:.0%}", color=TARGET)
    panels[1].set_title("Beyond the model's")


def _label(axes: Any, lengths: Sequence[int], top: float) -> None:
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel("MiB of resident memory")
    axes.set_ylim(0, 1.35 * top)
    axes.legend(loc="upper left", ncols=3, fontsize=8)


def _cases_2(quick: bool) -> list[Case]:
    found = []
    for length in (64,) if quick else (128, 256, 512, 1024, 2048):
        default = {"length": length, "dtype": "bfloat16"}
        found.append(Case(f"{_FIGURE_2}_paged_{length}", paged_peak, {"length": length}, timed=True))
        found.append(Case(f"{_FIGURE_2}_default_{length}", default_peak, default, timed=True))
    return found


def _rows_2(values: Cases) -> list[PaperRow]:
    found = []
    ways = {way: dict(_by_length(f"{_FIGURE_2}_{way}_", values)) for way in _WAYS}
    for way, cases in ways.items():
        for length, case in cases.items():
            found.append(_row(_FIGURE_2, f"{way}_{length}_incremental_mib", _mib(_increment(case)), "MiB"))
            found.append(_row(_FIGURE_2, f"{way}_{length}_kv_mib", _mib(case["kv_bytes"]), "MiB"))
            found.append(_row(_FIGURE_2, f"{way}_{length}_tokens_per_second", _speed(case), "tokens/s"))
    for length, paged in ways["paged"].items():
        default = ways["default"][length]
        process = paged["peak_bytes"] / default["peak_bytes"]
        increment = _increment(paged) / max(1, _increment(default))
        found += [
            _row(_FIGURE_2, f"process_{length}_paged_over_default_ratio", round(process, 4), "ratio"),
            _row(_FIGURE_2, f"incremental_{length}_paged_over_default_ratio", round(increment, 4), "ratio"),
            _row(_FIGURE_2, f"total_{length}_paged_over_default_ratio", _total_ratio(paged, default), "ratio"),
        ]
    return found


def _speed(case: Values) -> float:
    """Return the tokens per second of the decoded end of the sequence."""
    seconds: list[float] = case["seconds"]
    return round(1 / mean(seconds), 2)


def _total_ratio(paged: Values, default: Values) -> float:
    """Return the ratio of totals as the paper has them: the same weights for both, and each one's increment."""
    weights: int = default["weights_bytes"]
    return round((weights + _increment(paged)) / (weights + _increment(default)), 4)


def _draw_2(panels: Sequence[Any], values: Cases) -> None:
    """Bars of incremental memory by length with marks at the bytes of K and V, and lines of tokens per second."""
    left, right = panels
    ways = {way: dict(_by_length(f"{_FIGURE_2}_{way}_", values)) for way in _WAYS}
    for number, (way, (text, color)) in enumerate(_WAYS.items()):
        cases = ways[way]
        places = [place + 0.36 * (number - 0.5) for place in range(len(cases))]
        heights = [_mib(_increment(case)) for case in cases.values()]
        left.bar(places, heights, 0.33, color=color, label=text)
        marks = [_mib(case["kv_bytes"]) for case in cases.values()]
        left.plot(places, marks, "_", color=GREY, markersize=14, markeredgewidth=2)
        right.plot(range(len(cases)), [_speed(case) for case in cases.values()], "o-", color=color, label=text)
    left.plot([], [], "_", color=GREY, markersize=12, markeredgewidth=2, label="K and V")
    top = left.get_ylim()[1] / 1.05
    _label(left, list(ways["paged"]), top)
    _label(right, list(ways["paged"]), right.get_ylim()[1])
    left.set_ylabel("MiB beyond the model's")
    right.set_ylabel("tokens per second at the end")
    if 2048 in ways["paged"]:
        ratio, mark = _total_ratio(ways["paged"][2048], ways["default"][2048]), "total_2048_paged_over_default_ratio"
        paper = paper_value(_FIGURE_2, mark)
        left.set_title(f"With the weights, blocks over default at 2,048: {ratio:.3f}; paper: {paper:.3f}", color=TARGET)


def _cases_of_overhead(quick: bool) -> list[Case]:
    arguments = {"block_sizes": [16, 64, 128], "requests": 32 if quick else 320}
    return [Case(_OVERHEAD, granted_slots, arguments, timed=True)]


def _rows_of_overhead(values: Cases) -> list[PaperRow]:
    return [
        paper_row(_OVERHEAD, f"{mix}_{size}_{needed}_ratio", round(found[needed], 4), "ratio", Kind.ARITHMETIC)
        for mix, sizes in values[_OVERHEAD]["overheads"].items()
        for size, found in sizes.items()
        for needed in (*_NEEDED, "contiguous")
    ]


def _draw_overhead(panels: Sequence[Any], values: Cases) -> None:
    """Bars of overhead by block size, with the paper's bound, and the overhead of contiguous reservations."""
    bound = paper_value(_OVERHEAD, "mixed_16_of_tokens_ratio")
    for axes, (mix, text) in zip(panels, _MIXES.items(), strict=True):
        sizes = values[_OVERHEAD]["overheads"][mix]
        for number, ((needed, label), color) in enumerate(zip(_NEEDED.items(), (QUIRE, OTHER), strict=True)):
            places = [place + 0.36 * (number - 0.5) for place in range(len(sizes))]
            bars = axes.bar(places, [found[needed] for found in sizes.values()], 0.33, color=color, label=label)
            axes.bar_label(bars, labels=[f"{found[needed]:.1%}" for found in sizes.values()], padding=2, fontsize=8)
        whole = mean(found["contiguous"] for found in sizes.values())
        axes.bar(len(sizes), whole, 0.5, color=PEER, label="longest sequence reserved")
        axes.text(len(sizes), whole, f"{whole:.0%}", ha="center", va="bottom", fontsize=8)
        axes.axhline(bound, color=TARGET, linestyle="--", linewidth=1.3, label="paper: below 5 %")
        axes.set_xticks(range(len(sizes) + 1), [*(f"blocks of {size}" for size in sizes), "contiguous"])
        axes.set_yscale("log")
        axes.set_ylim(0.003, 12)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}" if value < 0.01 else f"{value:.0%}")
        axes.set_title(f"Prompts of {text} tokens, 128 tokens follow")
        axes.set_ylabel("granted over needed slots, minus 1")
        axes.legend(loc="upper left", ncols=2, fontsize=8)


MEMORY_FIGURES = (
    Figure(
        _FIGURE_1,
        "Figure 1 of FlexAttention: peak memory by length, in blocks (CPU)",
        _cases_1,
        _rows_1,
        _draw_1,
        (1, 2),
        (11, 3.8),
        "Stacked bars of peak memory by length: the model dominates, blocks grow with the length",
    ),
    Figure(
        _FIGURE_2,
        "Figure 2 of FlexAttention: peak memory and throughput by length, in blocks and by the default (CPU)",
        _cases_2,
        _rows_2,
        _draw_2,
        (1, 2),
        (11, 3.8),
        "Bars of memory beyond the model's by length, in blocks and by transformers' default, and tokens per second",
    ),
    Figure(
        _OVERHEAD,
        "Memory overhead of mixed lengths: the bound of 5 % in FlexAttention",
        _cases_of_overhead,
        _rows_of_overhead,
        _draw_overhead,
        (1, 2),
        (11, 3.8),
        "Bars of overhead for blocks of 16, 64 and 128 tokens around the bound of 5 %, far below contiguous memory's",
    ),
)
