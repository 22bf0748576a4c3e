"""The three scenarios of FlexAttention beyond 2,048 tokens, on the CPU: one sequence, a mixed batch, a growing chat.

Its pages have 64 or 128 tokens. Repeated rows have their standard deviation beside them.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from bench.papers.case import Case, Values
from bench.papers.figure import Figure
from bench.papers.measured import long_scenarios
from bench.papers.measured.ratios import MILLI, times_as_long
from bench.papers.rows import Kind, PaperRow, paper_row
from bench.report.picture import GREY, PEER, QUIRE, TARGET

_PAGES = (64, 128)
_COLORS = {64: QUIRE, 128: PEER}
_RUNS = 3
_LAYERS = 1  # of 30: all of them generate 100,000 tokens in hours
_ONE, _BATCH, _CHAT, _FUSED = "flex_one_sequence", "flex_mixed_batch", "flex_chat", "flex_fused"
_GENERATED = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 100_000)
_PROMPTS = tuple(range(500, 8_001, 500))
_GROWN = tuple(1_000 * 2**power for power in range(6))

Cases = Mapping[str, Values]


def _pages(name: str, run: Any, arguments: Mapping[str, Any]) -> list[Case]:
    """Return a timed case for each page size."""
    return [Case(f"{name}_{size}", run, {**arguments, "page_size": size}, timed=True) for size in _PAGES]


def _cases_one(quick: bool) -> list[Case]:
    lengths = (100, 300) if quick else _GENERATED
    arguments = {"tokens": max(lengths), "lengths": list(lengths), "layers": _LAYERS}
    return _pages(_ONE, long_scenarios.one_sequence, arguments)


def _cases_batch(quick: bool) -> list[Case]:
    prompts, decoded, runs = ((20, 60), 4, 2) if quick else (_PROMPTS, 128, _RUNS)
    arguments = {"prompts": list(prompts), "decoded": decoded, "repetitions": runs}
    return _pages(_BATCH, long_scenarios.mixed_batch, arguments)


def _cases_chat(quick: bool) -> list[Case]:
    lengths, answer, runs = ((100, 300), 4, 2) if quick else (_GROWN, 32, _RUNS)
    arguments = {"lengths": list(lengths), "answer": answer, "repetitions": runs}
    return _pages(_CHAT, long_scenarios.growing_chat, arguments)


def _cases_fused(quick: bool) -> list[Case]:
    lengths, runs = ((100, 300), 2) if quick else (_GROWN, _RUNS)
    return _pages(_FUSED, long_scenarios.paged_and_fused, {"lengths": list(lengths), "repetitions": runs})


def _row(figure: str, metric: str, value: float, unit: str) -> PaperRow:
    return paper_row(figure, metric, round(value, 4), unit, Kind.MEASURED)


def _with_deviation(figure: str, metric: str, values: Sequence[float], unit: str) -> list[PaperRow]:
    """Return the mean of repetitions, and their standard deviation."""
    deviation = stdev(values) if len(values) > 1 else 0.0
    return [_row(figure, metric, fmean(values), unit), _row(figure, f"{metric}_deviation", deviation, unit)]


def _rows_one(values: Cases) -> list[PaperRow]:
    rows = []
    for size in _PAGES:
        case = values[f"{_ONE}_{size}"]
        for length, seconds in case["seconds"].items():
            rows += _with_deviation(_ONE, f"{size}_{length}_ms", [one / MILLI for one in seconds], "ms")
        rows.append(_row(_ONE, f"{size}_all_seconds", case["total_seconds"], "s"))
        rows.append(_row(_ONE, f"{size}_kv_mib", case["kv_bytes"] / 2**20, "MiB"))
    return rows


def _rows_batch(values: Cases) -> list[PaperRow]:
    rows = []
    for size in _PAGES:
        case = values[f"{_BATCH}_{size}"]
        for prompt, seconds in case["first_seconds"].items():
            rows += _with_deviation(_BATCH, f"{size}_{prompt}_first_token_ms", [one / MILLI for one in seconds], "ms")
        speeds = [case["generated"] / seconds for seconds in case["seconds"]]
        rows += _with_deviation(_BATCH, f"{size}_tokens_per_second", speeds, "tokens/s")
        rows.append(_row(_BATCH, f"{size}_overhead_ratio", case["overhead"], "ratio"))
    return rows


def _rows_chat(values: Cases) -> list[PaperRow]:
    rows = []
    for size in _PAGES:
        case = values[f"{_CHAT}_{size}"]
        for length, seconds in case["first_seconds"].items():
            rows += _with_deviation(_CHAT, f"{size}_{length}_first_token_ms", [one / MILLI for one in seconds], "ms")
            per_token = median(case["seconds"][length]) / MILLI
            rows.append(_row(_CHAT, f"{size}_{length}_ms", per_token, "ms"))
    return rows


def _rows_fused(values: Cases) -> list[PaperRow]:
    rows = []
    for size in _PAGES:
        seconds = values[f"{_FUSED}_{size}"]["seconds"]
        for length in seconds["paged"]:
            for way in ("paged", "fused"):
                speeds = [1 / one for one in seconds[way][length]]
                rows += _with_deviation(_FUSED, f"{size}_{way}_{length}_tokens_per_second", speeds, "tokens/s")
            ratio = times_as_long(seconds["paged"][length], seconds["fused"][length])
            rows.append(_row(_FUSED, f"{size}_{length}_paged_over_fused_ratio", ratio, "ratio"))
    return rows


def _line(axes: Any, name: str, size: int, heights: Mapping[int, Sequence[float]], style: str = "o-") -> None:
    """Draw means with their deviations as bars."""
    means = [fmean(one) for one in heights.values()]
    deviations = [stdev(one) if len(one) > 1 else 0.0 for one in heights.values()]
    color = _COLORS[size] if style == "o-" else GREY
    axes.errorbar(list(heights), means, deviations, fmt=style, color=color, label=name, capsize=3)


def _label(axes: Any, heights: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of the sequence")
    axes.set_ylabel(heights)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", fontsize=8)


def _milliseconds(seconds: Mapping[str, Sequence[float]]) -> dict[int, list[float]]:
    return {int(length): [one / MILLI for one in times] for length, times in seconds.items()}


def _draw_one(panels: Sequence[Any], values: Cases) -> None:
    for size in _PAGES:
        _line(panels[0], f"pages of {size}", size, _milliseconds(values[f"{_ONE}_{size}"]["seconds"]))
    _label(panels[0], "milliseconds per token")


def _draw_first_tokens(name: str, panels: Sequence[Any], values: Cases) -> None:
    for size in _PAGES:
        _line(panels[0], f"pages of {size}", size, _milliseconds(values[f"{name}_{size}"]["first_seconds"]))
    _label(panels[0], "milliseconds to the first token")


def _draw_batch(panels: Sequence[Any], values: Cases) -> None:
    _draw_first_tokens(_BATCH, panels, values)


def _draw_chat(panels: Sequence[Any], values: Cases) -> None:
    _draw_first_tokens(_CHAT, panels, values)


def _draw_fused(panels: Sequence[Any], values: Cases) -> None:
    for size in _PAGES:
        seconds = values[f"{_FUSED}_{size}"]["seconds"]
        for way, style in (("paged", "o-"), ("fused", "s--")):
            speeds = {int(length): [1 / one for one in times] for length, times in seconds[way].items()}
            text = f"pages of {size}" if way == "paged" else f"torch's fused attention, beside pages of {size}"
            _line(panels[0], text, size, speeds, style)
    panels[0].axvline(2_048, color=TARGET, linestyle=":", linewidth=1, label="longest context in the paper")
    _label(panels[0], "tokens per second")
    panels[0].legend(loc="upper right", fontsize=8)


FIGURES = (
    Figure(
        _BATCH,
        "Mixed batch of FlexAttention: 16 prompts of 500 to 8,000 tokens at once (CPU)",
        _cases_batch,
        _rows_batch,
        _draw_batch,
        (1, 1),
        (8, 3.6),
        "Milliseconds to the first token by length of the prompt, for pages of 64 and 128 tokens",
    ),
    Figure(
        _CHAT,
        "Growing chat of FlexAttention: 1k to 32k tokens (CPU)",
        _cases_chat,
        _rows_chat,
        _draw_chat,
        (1, 1),
        (8, 3.6),
        "Milliseconds to the first token of each turn by length of the chat, for pages of 64 and 128 tokens",
    ),
    Figure(
        _FUSED,
        "Decoding beside fused attention on contiguous memory, to 32k tokens (CPU)",
        _cases_fused,
        _rows_fused,
        _draw_fused,
        (1, 1),
        (8, 3.6),
        "Tokens per second by length in pages of 64 and 128 tokens, and by torch's fused attention",
    ),
    Figure(
        _ONE,
        "Single sequence of FlexAttention: 100,000 generated tokens (CPU, 1 of 30 layers)",
        _cases_one,
        _rows_one,
        _draw_one,
        (1, 1),
        (8, 3.6),
        "Milliseconds per token over 100,000 generated tokens, for pages of 64 and 128 tokens",
    ),
)
