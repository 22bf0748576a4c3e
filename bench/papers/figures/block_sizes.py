"""Figures 18b and 19b of the PagedAttention paper: normalized latency by block size.

What is simulated is the use of memory; step times do not depend on the block size here. The time of the kernels by
block size is measured apart.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.papers.case import Case, Values
from bench.papers.figure import Figure
from bench.papers.rows import Kind, PaperRow, paper_row
from bench.papers.servers import OPT_13B
from bench.papers.simulation.run import simulate
from bench.papers.simulation.scenario import PAGED
from bench.papers.simulation.traces import FILES
from bench.report.picture import OTHER, PEER, QUIRE

_SIZES, _QUICK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256), (4, 16, 128)
_RATES = {"sharegpt": 1.9, "alpaca": 30.0}  # requests a second
_BEST = {"sharegpt": (16, 128), "alpaca": (16, 32)}  # the smallest and the largest block size that the paper found best
_DRAINED = 60.0  # seconds per token: a limit that no run reaches, so that all requests end
_QUICK_SECONDS = 40
_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2)  # ticks of an axis of latencies
# Ways to recover a preempted request in figure 19b, and the pieces in which a block is copied.
_RECOVERIES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap", "one_piece": False},
    "swap_in_one_piece": {"preemption": "swap", "one_piece": True},
}
_RECOVERY_RATE = 2.1  # requests a second: at times more than the pool holds, so that requests are preempted


def _case(name: str, size: int, quick: bool, **more: Any) -> Case:
    seconds = {"seconds": _QUICK_SECONDS} if quick else {}
    scenario = {"system": PAGED, **OPT_13B.scenario(size), "latency_limit": _DRAINED, **seconds, **more}
    return Case(f"{name}_{size}", simulate, scenario, files=(FILES[scenario["workload"]],))


def _cases_18b(quick: bool) -> list[Case]:
    return [
        _case(f"figure_18b_{workload}", size, quick, workload=workload, rate=rate)
        for workload, rate in _RATES.items()
        for size in (_QUICK_SIZES if quick else _SIZES)
    ]


def _cases_19b(quick: bool) -> list[Case]:
    return [
        _case(f"figure_19b_{way}", size, quick, workload="sharegpt", rate=_RECOVERY_RATE, **how)
        for way, how in _RECOVERIES.items()
        for size in (_QUICK_SIZES if quick else _SIZES)
    ]


def _sizes(prefix: str, values: Mapping[str, Values]) -> dict[int, float]:
    """Return the normalized latencies by block size."""
    return {size: values[f"{prefix}_{size}"]["normalized_latency"] for size in _SIZES if f"{prefix}_{size}" in values}


def _rows_18b(values: Mapping[str, Values]) -> list[PaperRow]:
    """Latencies, the block sizes within 10 % of the best one's, and the worst of the paper's best sizes over it."""
    rows = []
    for workload in _RATES:
        latencies = _sizes(f"figure_18b_{workload}", values)
        rows += [_seconds("figure_18b", f"{workload}_{size}", value) for size, value in latencies.items()]
        good = [size for size, value in latencies.items() if value <= 1.1 * min(latencies.values())]
        for name, size in (("smallest", min(good)), ("largest", max(good))):
            rows.append(paper_row("figure_18b", f"{workload}_{name}_good_size", size, "tokens", Kind.SIMULATED))
        low, high = _BEST[workload]
        worst = max((value for size, value in latencies.items() if low <= size <= high), default=0.0)
        ratio = round(worst / min(latencies.values()), 4)
        rows.append(paper_row("figure_18b", f"{workload}_papers_best_over_best_ratio", ratio, "ratio", Kind.SIMULATED))
    return rows


def _rows_19b(values: Mapping[str, Values]) -> list[PaperRow]:
    rows = []
    recomputed = _sizes("figure_19b_recompute", values)
    for way in _RECOVERIES:
        latencies = _sizes(f"figure_19b_{way}", values)
        rows += [_seconds("figure_19b", f"{way}_{size}", value) for size, value in latencies.items()]
    for way in ("swap", "swap_in_one_piece"):
        latencies = _sizes(f"figure_19b_{way}", values)
        worst = max(recomputed[size] / latencies[size] for size in latencies)
        rows.append(paper_row("figure_19b", f"largest_recompute_over_{way}", round(worst, 4), "ratio", Kind.SIMULATED))
    return rows


def _seconds(figure: str, metric: str, value: float) -> PaperRow:
    return paper_row(figure, f"{metric}_seconds_per_token", round(value, 5), "s/token", Kind.SIMULATED)


def _draw_18b(axes: Sequence[Any], values: Mapping[str, Values]) -> None:
    for panel, (workload, spans) in zip(axes, _BEST.items(), strict=True):
        latencies = _sizes(f"figure_18b_{workload}", values)
        _draw_line(panel, latencies, QUIRE, "Quire, simulated")
        panel.axvspan(*spans, color=OTHER, alpha=0.5, zorder=0, label="best sizes in the paper")
        panel.set_title(f"{'ShareGPT' if workload == 'sharegpt' else 'Alpaca'}, {_RATES[workload]:g} requests/s")
        panel.set_yscale("log")
        panel.set_yticks(_SECONDS, map(str, _SECONDS))
        panel.tick_params(axis="y", which="minor", left=False, labelleft=False)
        panel.set_ylim(min(latencies.values()) / 1.2, max(latencies.values()) * 1.2)
        panel.legend(loc="upper left", fontsize=7.5)


def _draw_19b(axes: Sequence[Any], values: Mapping[str, Values]) -> None:
    (panel,) = axes
    texts = {
        "recompute": (PEER, "recomputation"),
        "swap": (QUIRE, "swapping, two pieces for each layer"),
        "swap_in_one_piece": (OTHER, "swapping, one piece"),
    }
    for way, (color, text) in texts.items():
        _draw_line(panel, _sizes(f"figure_19b_{way}", values), color, text)
    panel.set_ylim(bottom=0)
    panel.legend(loc="upper center", fontsize=7.5)
    panel.set_title(f"OPT-13B, ShareGPT, {_RECOVERY_RATE:g} requests/s")


def _draw_line(panel: Any, latencies: Mapping[int, float], color: str, text: str) -> None:
    panel.plot(list(latencies), list(latencies.values()), "o-", color=color, label=text)
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(latencies), [str(size) for size in latencies])
    panel.set_xlabel("block size (tokens)")
    panel.set_ylabel("normalized latency (s/token)")


FIGURES = (
    Figure(
        "figure_18b",
        "Figure 18b: latency by block size, OPT-13B, simulated",
        _cases_18b,
        _rows_18b,
        _draw_18b,
        (1, 2),
        (8, 3.2),
        "Normalized latency over the block size for ShareGPT and Alpaca, with the paper's best sizes",
    ),
    Figure(
        "figure_19b",
        "Figure 19b: recomputation and swapping by block size, simulated",
        _cases_19b,
        _rows_19b,
        _draw_19b,
        (1, 1),
        (6, 3.4),
        "Normalized latency over the block size for recomputation and two ways of swapping",
    ),
)
