"""Figures 1 to 4 of FlexAttention, its perplexity and its bound on memory overhead, on the CPU and the demo model."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import log2
from typing import Any

from bench.engine.perplexity import logprobs_of_windows, perplexity, terms_in_blocks
from bench.papers.case import Case, Values
from bench.papers.figure import Figure
from bench.papers.figures import long_context_memory
from bench.papers.measured.decoding_times import paged_and_default, with_and_without_cache
from bench.papers.measured.ratios import MILLI, medians, times_as_long
from bench.papers.rows import Kind, PaperRow, paper_row, paper_value
from bench.report.picture import GREY, OTHER, PEER, QUIRE, TARGET

_LENGTHS, _FLEX_LENGTHS = (128, 256, 512, 1024, 2048), (128, 512, 2048)
_FIGURE_3, _FIGURE_4, _PERPLEXITY = "flex_figure_3", "flex_figure_4", "flex_perplexity"
_BACKENDS = {"cpu": "Quire's CPU kernels", "flex": "FlexAttention"}
# The type of the default's weights: that of the backend that it is compared with.
_DTYPES = {"cpu": "bfloat16", "flex": "float32"}

Cases = Mapping[str, Values]


def _cases_3(quick: bool) -> list[Case]:
    """Compile FlexAttention in full runs only."""
    if quick:
        return [_case_3("cpu", (64, 128), 1)]
    return [_case_3("cpu", _LENGTHS, 4), _case_3("flex", _FLEX_LENGTHS, 2)]


def _case_3(backend: str, lengths: Sequence[int], repetitions: int) -> Case:
    arguments = {"backend": backend, "lengths": list(lengths), "repetitions": repetitions}
    return Case(f"{_FIGURE_3}_{backend}", with_and_without_cache, arguments, timed=True)


def _of_backends(figure: str, values: Cases) -> Iterator[tuple[str, Mapping[str, dict[int, float]]]]:
    """Yield the measured backends, with milliseconds by way and length."""
    for backend in _BACKENDS:
        if case := values.get(f"{figure}_{backend}"):
            yield backend, {way: medians(seconds, MILLI) for way, seconds in case["seconds"].items()}


def _rows_3(values: Cases) -> list[PaperRow]:
    found = []
    for backend, ways in _of_backends(_FIGURE_3, values):
        for way, times in ways.items():
            found += [_row_3(f"{backend}_{way}_{length}_ms", time, "ms") for length, time in times.items()]
        found.append(_row_3(f"{backend}_cached_growth_ratio", round(_growth(ways["cached"]), 3), "ratio"))
        per_doubling = _growth(ways["recomputed"]) ** (1 / log2(max(ways["cached"]) / min(ways["cached"])))
        found.append(_row_3(f"{backend}_recomputed_per_doubling_ratio", round(per_doubling, 3), "ratio"))
    return found


def _row_3(metric: str, value: float, unit: str) -> PaperRow:
    return paper_row(_FIGURE_3, metric, value, unit, Kind.MEASURED)


def _growth(times: Mapping[int, float]) -> float:
    """Return the time at the longest length over that at the shortest."""
    return times[max(times)] / times[min(times)]


def _draw_3(panels: Sequence[Any], values: Cases) -> None:
    """Lines over the length with the cache and without, in milliseconds and relative to the shortest length."""
    left, right = panels
    colors = {("cpu", "cached"): QUIRE, ("flex", "cached"): OTHER, ("cpu", "recomputed"): PEER}
    for backend, ways in _of_backends(_FIGURE_3, values):
        for way, times in ways.items():
            text = f"{_BACKENDS[backend]}, {'with' if way == 'cached' else 'without'} the cache"
            color, line = colors.get((backend, way), GREY), "o-" if way == "cached" else "s--"
            left.plot(list(times), list(times.values()), line, color=color, label=text)
            first = times[min(times)]
            right.plot(list(times), [time / first for time in times.values()], line, color=color)
    _draw_growth_of_paper(right)
    left.set_ylabel("milliseconds per token")
    right.set_ylabel("times as long as at the shortest")
    for axes in panels:
        _label_lengths(axes)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.legend(loc="upper left", fontsize=7.5)
    left.set_ylim(left.get_ylim()[0], left.get_ylim()[1] * 30)


def _draw_growth_of_paper(axes: Any) -> None:
    cached = paper_value(_FIGURE_3, "cpu_cached_growth_ratio")
    doubling = paper_value(_FIGURE_3, "cpu_recomputed_per_doubling_ratio")
    assert cached is not None
    assert doubling is not None
    axes.plot((128, 2048), (1, cached), "D:", color=TARGET, label=f"paper, with the cache: {cached:g} at 2,048")
    text = f"paper, without: {doubling:g} per doubling"
    axes.plot((128, 256, 512), (1, doubling, doubling**2), "D--", color=TARGET, label=text)


def _label_lengths(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(_LENGTHS, [f"{length:,}" for length in _LENGTHS])
    axes.set_xlabel("tokens of the sequence")


def _cases_4(quick: bool) -> list[Case]:
    """Compile FlexAttention in full runs only."""
    if quick:
        return [_case_4("cpu", (64,), 1)]
    return [_case_4("cpu", _LENGTHS, 4), _case_4("flex", _LENGTHS, 3)]


def _case_4(backend: str, lengths: Sequence[int], repetitions: int) -> Case:
    arguments = {
        "backend": backend,
        "dtype": _DTYPES[backend],
        "lengths": list(lengths),
        "repetitions": repetitions,
    }
    return Case(f"{_FIGURE_4}_{backend}", paged_and_default, arguments, timed=True)


def _rows_4(values: Cases) -> list[PaperRow]:
    found = []
    for backend, ways in _of_backends(_FIGURE_4, values):
        for way, times in ways.items():
            found += [_row_4(f"{backend}_{way}_{length}_ms", time, "ms") for length, time in times.items()]
        ratios = _paged_over_default(values, backend)
        for length, ratio in ratios.items():
            found.append(_row_4(f"{backend}_paged_over_default_{length}_ratio", ratio, "ratio"))
        found.append(_row_4(f"{backend}_highest_paged_over_default_ratio", max(ratios.values()), "ratio"))
    return found


def _row_4(metric: str, value: float, unit: str) -> PaperRow:
    return paper_row(_FIGURE_4, metric, value, unit, Kind.MEASURED)


def _paged_over_default(values: Cases, backend: str) -> dict[int, float]:
    seconds = values[f"{_FIGURE_4}_{backend}"]["seconds"]
    return {int(length): times_as_long(times, seconds["default"][length]) for length, times in seconds["paged"].items()}


def _draw_4(panels: Sequence[Any], values: Cases) -> None:
    """Lines of milliseconds by length, and of the ratio of blocks to the default."""
    left, right = panels
    colors = {"cpu": (QUIRE, PEER), "flex": (OTHER, GREY)}
    for backend, ways in _of_backends(_FIGURE_4, values):
        texts = (f"blocks, {_BACKENDS[backend]}", f"transformers' default, {_DTYPES[backend]}")
        for times, color, text in zip(ways.values(), colors[backend], texts, strict=True):
            left.plot(list(times), list(times.values()), "o-", color=color, label=text)
        ratios = _paged_over_default(values, backend)
        right.plot(list(ratios), list(ratios.values()), "o-", color=colors[backend][0], label=_BACKENDS[backend])
    bound = paper_value(_FIGURE_4, "cpu_highest_paged_over_default_ratio")
    right.axhline(bound, color=TARGET, linestyle="--", linewidth=1.3, label="paper: blocks always below the default")
    left.set_ylabel("milliseconds per token")
    right.set_ylabel("blocks over the default")
    for axes in panels:
        _label_lengths(axes)
        axes.set_ylim(0, 1.6 * axes.get_ylim()[1])
        axes.legend(loc="upper left", fontsize=8)


def _cases_of_perplexity(quick: bool) -> list[Case]:
    count, tokens = (1, 128) if quick else (12, 1024)
    arguments = {"count": count, "window_tokens": tokens}
    return [Case(_PERPLEXITY, perplexities, arguments, timed=True, files=("wikitext2_valid.txt",))]


def perplexities(count: int, window_tokens: int) -> Values:
    """Return the perplexity of windows of WikiText in blocks and by transformers, with their log-probabilities."""
    logprobs = logprobs_of_windows(count, window_tokens)
    found = {way: perplexity(sums, window_tokens) for way, sums in logprobs.items()}
    terms = asdict(replace(terms_in_blocks(), work=f"{count} windows of {window_tokens} tokens"))
    return {"perplexity": found, "logprobs_of_windows": logprobs, "window_tokens": window_tokens, "terms": terms}


def _rows_of_perplexity(values: Cases) -> list[PaperRow]:
    found = values[_PERPLEXITY]["perplexity"]
    ours, theirs = found["in_blocks"], found["transformers"]
    figures = {
        "paged": (ours, "1"),
        "baseline": (theirs, "1"),
        "relative_difference": (abs(ours / theirs - 1), "ratio"),
    }
    return [
        paper_row(_PERPLEXITY, metric, round(value, 9), unit, Kind.MEASURED)
        for metric, (value, unit) in figures.items()
    ]


def _draw_perplexity(panels: Sequence[Any], values: Cases) -> None:
    """Two bars, with the paper's values as marks."""
    axes, found = panels[0], values[_PERPLEXITY]["perplexity"]
    shown = {"paged": ("in blocks", found["in_blocks"], QUIRE), "baseline": ("baseline", found["transformers"], PEER)}
    for place, (metric, (_, value, color)) in enumerate(shown.items()):
        axes.barh(place, value, 0.5, color=color)
        axes.text(value, place, f"  {value:.4f}", va="center")
        mark = paper_value(_PERPLEXITY, metric)
        axes.plot([mark] * 2, [place - 0.35, place + 0.35], color=TARGET, linewidth=2.2)
        axes.text(mark, place + 0.36, f"paper: {mark}", color=TARGET, ha="center", va="bottom", fontsize=8)
    axes.set_yticks(range(len(shown)), [text for text, _, _ in shown.values()])
    axes.set_ylim(-0.5, len(shown))
    axes.set_xlim(0, 1.2 * max(found.values()))
    axes.set_xlabel("perplexity of WikiText; the paper's model is Llama-2-7B, ours has 135 million weights")
    axes.grid(axis="y", visible=False)


FIGURES = (
    *long_context_memory.MEMORY_FIGURES,
    Figure(
        _FIGURE_3,
        "Figure 3 of FlexAttention: time per token by length, with the KV cache and without (CPU)",
        _cases_3,
        _rows_3,
        _draw_3,
        (1, 2),
        (11, 4.0),
        "Milliseconds per token by length, nearly flat with the cache and rising without, beside the paper's growth",
    ),
    Figure(
        _FIGURE_4,
        "Figure 4 of FlexAttention: decode time per token by length, in blocks and by the default (CPU)",
        _cases_4,
        _rows_4,
        _draw_4,
        (1, 2),
        (11, 3.8),
        "Milliseconds per token by length of two paged backends and transformers' default, and their ratios",
    ),
    Figure(
        _PERPLEXITY,
        "Perplexity of WikiText in blocks and without a cache, float32",
        _cases_of_perplexity,
        _rows_of_perplexity,
        _draw_perplexity,
        (1, 1),
        (8, 2.6),
        "Two bars of equal perplexity, in blocks and of transformers, with the paper's values as marks",
    ),
)
