"""Figure 18 of PagedAttention, its attention kernel: on blocks and contiguous memory, and by block size."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from bench.papers.case import Case, Values
from bench.papers.figure import Figure
from bench.papers.measured import kernel_times
from bench.papers.measured.ratios import MICRO, times_as_long
from bench.papers.rows import Kind, PaperRow, paper_row, paper_value
from bench.report.picture import GREY, OTHER, PEER, QUIRE, TARGET

_BATCHES, _CONTEXTS = (8, 32), (64, 128, 256)
_BLOCK_SIZES = tuple(2**power for power in range(9))
_CASE_18A, _CASE_18B = "figure_18a_kernels", "figure_18b_kernels_"
_PEERS = {"one_block": ("one block a sequence", OTHER), "sdpa": ("torch's SDPA", PEER)}
# Sequences and tokens, name, colour, and the block sizes at which the paper found serving fastest.
_MIXES = {
    "sharegpt": (32, 500, "ShareGPT: 32 sequences of 500 tokens", QUIRE, (16, 128)),
    "alpaca": (64, 80, "Alpaca: 64 sequences of 80 tokens", PEER, (16, 32)),
}


def _cases_18a(quick: bool) -> list[Case]:
    contexts, repetitions = ((64, 128), 3) if quick else (_CONTEXTS, 100)
    arguments = {"sequences": list(_BATCHES), "contexts": list(contexts), "repetitions": repetitions}
    return [Case(_CASE_18A, kernel_times.paged_and_contiguous, arguments, timed=True)]


def _rows_18a(values: Mapping[str, Values]) -> list[PaperRow]:
    case = values[_CASE_18A]
    found = []
    for size, seconds in case["seconds"].items():
        for way, times in seconds.items():
            found.append(_row_18a(f"{size}_{way}_us_per_layer", _per_layer(times, case), "us"))
        for peer in ("in_order", *_PEERS):
            found.append(_row_18a(f"{size}_over_{peer}_ratio", _over(seconds, peer), "ratio"))
    for peer in _PEERS:
        ratios = [_over(seconds, peer) for seconds in case["seconds"].values()]
        found.append(_row_18a(f"lowest_over_{peer}_ratio", min(ratios), "ratio"))
        found.append(_row_18a(f"highest_over_{peer}_ratio", max(ratios), "ratio"))
    return found


def _row_18a(metric: str, value: float, unit: str) -> PaperRow:
    return paper_row("figure_18a", metric, value, unit, Kind.MEASURED)


def _per_layer(seconds: Sequence[float], case: Values) -> float:
    layers: int = case["layers"]
    return round(median(seconds) / layers / MICRO, 2)


def _over(seconds: Mapping[str, Sequence[float]], peer: str) -> float:
    return times_as_long(seconds["paged"], seconds[peer])


def _sizes(case: Values) -> Iterator[tuple[int, list[int]]]:
    """Yield each batch size with its contexts."""
    sizes = [tuple(int(part[1:]) for part in size.split("_")) for size in case["seconds"]]
    for batch in sorted({batch for batch, _ in sizes}):
        yield batch, [context for other, context in sizes if other == batch]


def _draw_18a(panels: Sequence[Any], values: Mapping[str, Values]) -> None:
    """Lines of latency by context, and of its ratio to both peers beside the paper's range."""
    case, (left, right) = values[_CASE_18A], panels
    shown = {"paged": ("blocks of 16, random", QUIRE), **_PEERS}
    for (batch, contexts), line in zip(_sizes(case), ("o-", "s--"), strict=False):
        found = [case["seconds"][f"b{batch}_c{context}"] for context in contexts]
        for way, (text, color) in shown.items():
            heights = [_per_layer(seconds[way], case) for seconds in found]
            left.plot(contexts, heights, line, color=color, label=f"{text}, batch {batch}")
        for peer, (text, color) in _PEERS.items():
            ratios = [_over(seconds, peer) for seconds in found]
            right.plot(contexts, ratios, line, color=color, label=f"over {text}, batch {batch}")
    low, high = (paper_value("figure_18a", f"{end}_over_one_block_ratio") for end in ("lowest", "highest"))
    right.axhspan(low, high, color=TARGET, alpha=0.35, label="paper: 1.20 to 1.26, over FasterTransformer")
    right.axhline(1.0, color=GREY, linewidth=1)
    left.set_ylabel("microseconds per layer")
    left.set_yscale("log")
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    right.set_ylabel("latency, blocks over contiguous")
    right.set_ylim(0, max(2.0, 1.7 * right.dataLim.ymax))
    for axes in panels:
        axes.set_xlabel("tokens of context")
        axes.set_xticks(_CONTEXTS)
        axes.legend(loc="upper left", fontsize=7.5, ncols=2 if axes is left else 1)
    left.set_ylim(left.get_ylim()[0], left.get_ylim()[1] * 6)


def _cases_18b(quick: bool) -> list[Case]:
    layers, repetitions = (2, 3) if quick else (10, 40)
    fixed = {"block_sizes": list(_BLOCK_SIZES), "layers": layers, "repetitions": repetitions}
    mixes = {mix: {"sequences": mixed[0], "context": mixed[1]} for mix, mixed in _MIXES.items()}
    return [
        Case(_CASE_18B + mix, kernel_times.by_block_size, sizes | fixed, timed=True) for mix, sizes in mixes.items()
    ]


def _rows_18b(values: Mapping[str, Values]) -> list[PaperRow]:
    found = []
    for mix in _MIXES:
        case = values[_CASE_18B + mix]
        for size, seconds in case["seconds"].items():
            micros, relative = _per_layer(seconds, case), times_as_long(seconds, case["seconds"]["16"])
            found.append(_row_18b(f"{mix}_{size}_us_per_layer", micros, "us"))
            found.append(_row_18b(f"{mix}_{size}_over_16_ratio", relative, "ratio"))
    return found


def _row_18b(metric: str, value: float, unit: str) -> PaperRow:
    return paper_row("figure_18b_kernels", metric, value, unit, Kind.MEASURED)


def _draw_18b(panels: Sequence[Any], values: Mapping[str, Values]) -> None:
    """Lines of the kernel's time over that of blocks of 16, with the paper's best block sizes as bars."""
    axes = panels[0]
    for place, (mix, (_, _, text, color, best)) in enumerate(_MIXES.items()):
        seconds = values[_CASE_18B + mix]["seconds"]
        relative = [times_as_long(times, seconds["16"]) for times in seconds.values()]
        axes.plot([int(size) for size in seconds], relative, "o-", color=color, label=text)
        height = 0.5 - 0.12 * place
        axes.plot(best, [height] * 2, color=color, linewidth=4, alpha=0.5, solid_capstyle="butt")
        axes.text(best[1] * 1.08, height, f"paper's best, {mix}", va="center", color=TARGET, fontsize=8)
    axes.axhline(1.0, color=GREY, linewidth=1)
    axes.axvspan(0.8, 11.3, color=GREY, alpha=0.12, linewidth=0)
    axes.text(0.9, 0.62, "no multiples of 16: slot by slot", color=GREY, fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.8, 700)
    axes.set_xticks(_BLOCK_SIZES, [str(size) for size in _BLOCK_SIZES])
    axes.set_ylim(0, axes.get_ylim()[1])
    axes.set_xlabel("tokens per block")
    axes.set_ylabel("kernel's time over that of blocks of 16")
    axes.legend(loc="upper right")


FIGURES = (
    Figure(
        "figure_18a",
        "Figure 18a: latency of decode attention, on blocks and on contiguous memory (CPU)",
        _cases_18a,
        _rows_18a,
        _draw_18a,
        (1, 2),
        (11, 3.8),
        "Microseconds of attention by context for two batch sizes, and ratios beside the paper's 1.20 to 1.26",
    ),
    Figure(
        "figure_18b_kernels",
        "Figure 18b, kernel: time of decode attention by block size (CPU)",
        _cases_18b,
        _rows_18b,
        _draw_18b,
        (1, 1),
        (8, 3.8),
        "Two lines of the kernel's time by block size over that of blocks of 16: several times longer below 16",
    ),
)
