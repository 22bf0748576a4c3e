"""Draws the results of benchmarks: `python -m bench.plots NAME...`, or all that have results and something to show.

Each picture is made from `bench/results/NAME.json` alone, and drawn again whenever that is written.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import linear_regression, median, quantiles
from typing import Any, NamedTuple

from bench.report import RESULTS, ROOT, targets
from services.loadgen.report.drawing import BLUE, GREY, ORANGE, RED, SKY, STYLE

IMAGES = ROOT / "docs" / "images"
QUIRE, PEER, OTHER, TARGET = BLUE, ORANGE, SKY, RED
MILLI = 1e-3
_DEMO_LAYERS = 30

Result = Mapping[str, Any]


class Picture(NamedTuple):
    """How a benchmark's results are drawn into axes, how many and how large they are, and what is seen."""

    draw: Callable[[Sequence[Any], Result], None]
    panels: int
    inches: tuple[float, float]
    title: str
    seen: str


def draw(benchmark: str, results: Path = RESULTS, images: Path = IMAGES) -> Path | None:
    """Draw a benchmark's results; return where, None where there is nothing to draw."""
    path = results / f"{benchmark}.json"
    if benchmark not in PICTURES or not path.exists():
        return None
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    picture = PICTURES[benchmark]
    result = json.loads(path.read_text())
    with mpl.rc_context(STYLE):
        figure, grid = pyplot.subplots(1, picture.panels, figsize=picture.inches, layout="constrained", squeeze=False)
        picture.draw(grid[0], result)
        figure.suptitle(picture.title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        images.mkdir(parents=True, exist_ok=True)
        drawn = images / f"bench-{benchmark}.png"
        figure.savefig(drawn, dpi=130)
        pyplot.close(figure)
    return drawn


_ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}


def _cpu(panels: Sequence[Any], result: Result) -> None:
    """Bars of the speed over the better peer's; tokens per second stand over them."""
    axes, seconds = panels[0], result["seconds"]
    who = {"quire": ("Quire", QUIRE)}
    labels = {"openvino": (PEER, "openvino-genai"), "vllm": (OTHER, "vLLM (CPU)")}
    for label in result["peers"]:
        color, shown = labels[label]
        who[label] = (shown, color)
    values = {one["metric"]: one["value"] for one in result["rows"]}
    for place, (label, (shown, color)) in enumerate(who.items()):
        xs, heights = [], []
        for at, spent in enumerate(seconds.values()):
            if label in spent:
                peers = [spent[peer] for peer in result["peers"] if peer in spent] or [spent["quire"]]
                best = [min(times) for times in zip(*peers, strict=True)]
                xs.append(at + 0.27 * (place - 1))
                heights.append(median(their / own for their, own in zip(best, spent[label], strict=True)))
        axes.bar(xs, heights, 0.25, color=color, label=shown)
        rates = [values[f"{name}_{label}_tokens_per_second"] for name in seconds if label in seconds[name]]
        for x, height, rate in zip(xs, heights, rates, strict=True):
            axes.text(x, height + 0.015, f"{rate:,.0f}", ha="center", va="bottom", fontsize=8, bbox=_ON_WHITE)
    axes.axhline(1.0, color=TARGET, linestyle="--", linewidth=1.3, zorder=1.5, label="target: the better peer")
    axes.set_xticks(range(len(seconds)), [_WORKLOADS.get(name, name) for name in seconds])
    axes.set_ylabel("speed over the better peer's")
    alone = not any(result["peers"].values())
    medians = "medians of repetitions" + ("; no peer ran" if alone else " in which all take turns")
    axes.set_title(f"Tokens per second stand over the bars; {medians}")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
    axes.legend(loc="upper right", ncols=4)


_WORKLOADS = {
    "b1": "1 request\n32 in, 64 out",
    "b8": "8 requests\n128 in, 64 out",
    "b32": "32 requests\n128 in, 64 out",
    "b32_short": "32 requests\n16 in, 128 out",
    "ragged": "16 requests\n16 to 2,000 in, 64 out",
}


def _kernels(panels: Sequence[Any], result: Result) -> None:
    """Bars of the milliseconds of a layer, beside the floor and what the target allows."""
    axes, layers = panels[0], result.get("layers", _DEMO_LAYERS)
    shown = {
        "gathered": ("gathered, then torch's SDPA", PEER),
        "contiguous": ("torch's SDPA, contiguous", PEER),
        "paged": ("Quire, random table", QUIRE),
        "identity": ("Quire, blocks in order", QUIRE),
        "floor": ("floor: reading K and V", GREY),
    }
    times = {name: median(result["seconds"][name]) / layers / MILLI for name in shown}
    allowed = times["floor"] / _target("kernels", "decode_of_the_floor")
    most = 1.15 * max(allowed, *(time for name, time in times.items() if name != "gathered"))
    for place, (name, (_, color)) in enumerate(shown.items()):
        axes.barh(place, min(times[name], most), 0.62, color=color)
        beyond = times[name] > most
        text = f"{times[name]:.1f} ms, far beyond the axis  " if beyond else f"  {times[name]:.2f} ms"
        side = "right" if beyond else "left"
        axes.text(min(times[name], most), place, text, va="center", ha=side, color="black")
    axes.axvline(allowed, color=TARGET, linestyle="--", linewidth=1.3)
    axes.text(allowed, len(shown) - 0.45, "  target: 0.60 of the floor's speed", color=TARGET, va="bottom")
    axes.set_yticks(range(len(shown)), [text for text, _ in shown.values()])
    axes.set_ylim(-0.5, len(shown))
    axes.set_xlim(0, most)
    axes.set_xlabel("milliseconds per layer, less is better")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)


def _context(panels: Sequence[Any], result: Result) -> None:
    """Two lines of milliseconds per token over the context, and the line that was fitted to one of them."""
    cached, recomputed = (_medians(result[f"{way}_seconds"]) for way in ("with_cache", "recomputed"))
    values = {one["metric"]: one["value"] for one in result["rows"]}
    left, right = panels
    left.plot(list(cached), list(cached.values()), "o", color=QUIRE, label="Quire, median")
    fitted = {context: time for context, time in cached.items() if context >= 1024}
    line = linear_regression(list(fitted), list(fitted.values()))
    ends = (min(cached), max(cached))
    fit = f"line through 1k to 8k: R² = {values['linear_fit_r2']:.3f}"
    left.plot(ends, [line.intercept + line.slope * end for end in ends], color=GREY, label=fit)
    left.set_title("With the KV cache")
    left.set_ylim(0, 1.15 * max(cached.values()))
    left.legend(loc="lower right")
    for times, color, text in ((cached, QUIRE, "with the KV cache"), (recomputed, PEER, "context computed anew")):
        right.plot(list(times), list(times.values()), "o-", color=color)
        context = list(times)[-2]
        right.text(context, times[context] * 1.5, text, color=color, ha="right")
    right.set_title("Beside computing the context anew for each token; both axes logarithmic")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(list(cached), [f"{c}" if c < 1024 else f"{c // 1024}k" for c in cached])
    right.minorticks_off()
    right.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.set_xticks(range(0, 8193, 2048), ["0", "2k", "4k", "6k", "8k"])
    for axes in panels:
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("milliseconds per token")


def _medians(seconds: Mapping[str, Sequence[float]]) -> dict[int, float]:
    """Return milliseconds by the tokens of the context."""
    return {int(context): median(times) / MILLI for context, times in seconds.items()}


def _copies(panels: Sequence[Any], result: Result) -> None:
    """Bars of gigabytes per second, beside one large copy."""
    axes, seconds = panels[0], result["seconds"]
    large = result["bytes"] / median(seconds["one_large_copy"]) / 1e9
    ways = ("swap_out", "swap_in", "copy")
    for prefix, color, label, shift in (("", QUIRE, "CPU kernels", -0.2), ("torch_", OTHER, "torch backend", 0.2)):
        rates = [result["bytes"] / median(seconds[f"{prefix}{way}"]) / 1e9 for way in ways]
        bars = axes.bar([at + shift for at in range(len(ways))], rates, 0.38, color=color, label=label)
        axes.bar_label(bars, fmt="%.1f", label_type="center", color="white", fontweight="bold")
    axes.axhline(large, color=GREY, linewidth=1.3, label=f"one large copy by torch ({large:.1f})")
    least = _target("copies", "copy_over_one_large_copy")
    axes.axhline(least * large, color=TARGET, linestyle="--", linewidth=1.3, label=f"target: {least:.2f} of it")
    axes.set_xticks(range(len(ways)), ["to the host tier", "from the host tier", "within the cache"])
    axes.set_ylabel("gigabytes copied per second")
    axes.set_ylim(0, 1.45 * axes.dataLim.ymax)
    axes.legend(loc="upper left", ncols=2)


def _system(panels: Sequence[Any], result: Result) -> None:
    """Both rates with all repetitions, and who used the CPU."""
    left, right = panels
    values = {one["metric"]: one["value"] for one in result["rows"]}
    tokens = values["system_tokens_per_second"] * median(run["system"]["seconds"] for run in result["runs"])
    shown = {"in_process": ("engine in process", GREY), "system": ("whole system", QUIRE)}
    for place, (name, (_, color)) in enumerate(shown.items()):
        rate = values[f"{name}_tokens_per_second"]
        left.bar(place, rate, 0.6, color=color)
        left.text(place, rate / 2, f"{rate:,.0f}", ha="center", va="center", color="white", fontweight="bold")
        dots = [tokens / run[name]["seconds"] for run in result["runs"]]
        beside = [place + 0.05 * (number - len(dots) // 2) for number in range(len(dots))]
        left.plot(beside, dots, "o", color="black", markersize=4, alpha=0.7)
    least = _target("system", "over_in_process")
    height = least * values["in_process_tokens_per_second"]
    left.axhline(
        height, color=TARGET, linestyle="--", linewidth=1.3, label=f"target: {least:.2f} of the engine in process"
    )
    left.set_ylim(0, 1.2 * left.dataLim.ymax)
    left.legend(loc="upper right")
    left.set_xticks(range(len(shown)), [text for text, _ in shown.values()])
    left.set_ylabel("tokens per second, all streams together")
    left.set_title("Speed; a dot for each repetition")
    roles = {"engine_in_process": GREY, "engine": QUIRE, "gateway": PEER, "kvmanager": OTHER, "client": "#CC79A7"}
    for place, (role, color) in enumerate(reversed(roles.items())):
        used = values[f"{role}_cpu_seconds"]
        right.barh(place, used, 0.62, color=color)
        right.text(used, place, f"  {used:.2f} s", va="center")
    names = {"kvmanager": "KV manager", "engine_in_process": "engine in process\n(by itself)"}
    right.set_yticks(range(len(roles)), [names.get(role, role) for role in reversed(roles)])
    right.set_xlim(0, 1.2 * right.dataLim.xmax)
    right.set_xlabel("CPU seconds for 32 streams")
    right.set_title("Who used the CPU")
    right.grid(axis="y", visible=False)


def _sharing(panels: Sequence[Any], result: Result) -> None:
    """Per cent of blocks saved over the number of sequences, beside the paper's."""
    values = {one["metric"]: one["value"] for one in result["rows"]}
    for axes, mix in zip(panels, ("alpaca", "sharegpt"), strict=True):
        for color, kind, text in ((QUIRE, "beam_width_{}", "beams"), (PEER, "{}_samples", "samples")):
            ours, theirs = ({}, {})
            for count in (2, 4, 6):
                metric = f"{mix}_{kind.format(count)}_saved"
                ours[count] = values[metric]
                if f"{metric}_in_the_paper" in values:
                    theirs[count] = values[f"{metric}_in_the_paper"]
            axes.plot(list(ours), list(ours.values()), "o-", color=color, label=f"{text}, Quire")
            axes.plot(list(theirs), list(theirs.values()), "s--", color=color, mfc="white", label=f"{text}, the paper")
            for count, saved in ours.items():
                axes.annotate(f"{saved:.0f}", (count, saved), (7, -11), textcoords="offset points")
        axes.set_title({"alpaca": "Alpaca", "sharegpt": "ShareGPT"}[mix])
        axes.set_xticks((2, 4, 6))
        axes.set_xlim(1.6, 6.6)
        axes.set_ylim(0, 80)
        axes.set_xlabel("sequences of one prompt")
        axes.set_ylabel("per cent of blocks saved")
    panels[0].legend(loc="upper left", ncols=2)


def _kv(panels: Sequence[Any], result: Result) -> None:
    """Microseconds of what is done often, beside vLLM's and the targets; and how they grow with the pool."""
    left, right = panels
    shown = {
        "decode_us_per_sequence": "decode, per sequence",
        "prefill_us_per_block": "prefill, per block",
        "free_us_per_block": "free, per block",
    }
    sides = [(QUIRE, "Quire", result["runs"], -0.2)]
    if result["vllm_runs"]:
        sides.append((PEER, "vLLM", result["vllm_runs"], 0.2))
    for color, label, runs, shift in sides:
        heights = [median(run[metric] for run in runs) for metric in shown]
        bars = left.bar([at + shift for at in range(len(shown))], heights, 0.38, color=color, label=label)
        left.bar_label(bars, fmt="%.2f", padding=2)
    names = [f"{text}\n(target: at most {_target('kv', metric):g})" for metric, text in shown.items()]
    left.set_xticks(range(len(shown)), names)
    left.set_ylim(0, 1.1 * left.dataLim.ymax)
    left.set_ylabel("microseconds, less is better")
    left.set_title("In process, 256 sequences, a pool of 100,000 blocks")
    left.legend(loc="upper right")
    sizes = {int(size): times for size, times in result["decode_us_by_pool_blocks"].items()}
    medians = [median(times) if isinstance(times, list) else times for times in sizes.values()]
    right.plot(list(sizes), medians, "o-", color=QUIRE)
    for size, time in zip(sizes, medians, strict=True):
        right.annotate(f"{time:.2f}", (size, time), (0, 7), textcoords="offset points", ha="center")
    right.set_xscale("log")
    right.set_ylim(0, 1.4 * max(medians))
    right.set_xticks(list(sizes), [f"{size:,}" for size in sizes])
    right.minorticks_off()
    right.set_xlim(600, 1_700_000)
    right.set_xlabel("blocks of the pool, in random free order")
    right.set_ylabel("microseconds per sequence and step")
    right.set_title("Decoding, by the size of the pool (32 sequences)")


def _kv_engine(panels: Sequence[Any], result: Result) -> None:
    """Ratios of each repetition, with their quartiles."""
    axes = panels[0]
    pairs = {
        "books over gRPC,\nover books in process": ("over_grpc", "in_process"),
        "1 ms added to each answer,\nover none added": ("one_ms_added", "over_grpc"),
    }
    for place, (name, below) in enumerate(pairs.values()):
        ratios = sorted(run[name]["rate"] / run[below]["rate"] for run in result["runs"])
        upper = quantiles(ratios, n=4)[2]
        axes.plot(ratios, [place] * len(ratios), "o", color=QUIRE, alpha=0.6)
        axes.plot([upper] * 2, [place - 0.2, place + 0.2], color="black", linewidth=2)
        axes.text(upper, place + 0.23, f"upper quartile {upper:.2f}", ha="center", va="bottom", bbox=_ON_WHITE)
    least = _target("kv_engine", "over_grpc_upper_quartile_ratio")
    axes.axvline(least, color=TARGET, linestyle="--", linewidth=1.3)
    axes.text(least, -0.55, f"target for the upper quartile: {least:.2f} ", color=TARGET, ha="right", va="bottom")
    axes.set_yticks(range(len(pairs)), list(pairs))
    axes.set_ylim(-0.6, len(pairs) - 0.4)
    axes.set_xlabel("ratio of tokens per second, a dot for each repetition")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)


def _decoding(panels: Sequence[Any], result: Result) -> None:
    """Tokens per second of each way of decoding, by the number of sequences."""
    axes = panels[0]
    values = {one["metric"]: one["value"] for one in result["rows"]}
    ways = {"greedy": ("as many greedy answers", GREY), "samples": ("samples", PEER), "beams": ("beams", QUIRE)}
    for place, (name, (label, color)) in enumerate(ways.items()):
        heights = [values[f"{name}_{width}_tokens_per_second"] for width in (2, 4, 6)]
        bars = axes.bar([at + 0.27 * (place - 1) for at in range(3)], heights, 0.25, color=color, label=label)
        axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_xticks(range(3), ["2 sequences", "4 sequences", "6 sequences"])
    axes.set_ylabel("tokens per second, all sequences together")
    axes.set_ylim(0, 1.15 * axes.dataLim.ymax)
    axes.legend(loc="upper left")


def _streams(panels: Sequence[Any], result: Result) -> None:
    """The delay and the CPU's share at each pace."""
    levels = result["levels"]
    rates = [level["tokens_per_second"] for level in levels]
    delays, shares = panels
    delays.plot(rates, [level["delay_p50_ms"] for level in levels], "o-", color=QUIRE, label="median")
    delays.plot(rates, [level["delay_p99_ms"] for level in levels], "s-", color=OTHER, label="99th percentile")
    delays.plot(
        rates, [1000 / level["tokens_per_second_of_a_stream"] for level in levels], ":", color=GREY, label="a step"
    )
    delays.set_yscale("log")
    delays.set_ylabel("milliseconds from engine to client")
    shares.plot(rates, [level["gateway_cpu_us_per_token"] for level in levels], "o-", color=QUIRE)
    shares.set_ylabel("gateway's CPU microseconds per token")
    shares.set_ylim(0, 1.2 * shares.dataLim.ymax)
    for axes in panels:
        axes.set_xlabel("tokens per second, all 500 streams together")
        axes.set_xlim(0, 1.08 * max(rates))
    delays.legend(loc="upper left")


def _overload(panels: Sequence[Any], result: Result) -> None:
    """What refused requests were told beside when there was room, and how long the others waited for a token."""
    forecasts, waits = panels
    points = result["forecasts"]
    most = 1.1 * max(max(one["told"], one["found"]) for one in points)
    forecasts.fill_between(
        [0, most], [0, most / 2], [0, 2 * most], color=GREY, alpha=0.2, label="within a factor of two"
    )
    found, told = ([one[name] for one in points] for name in ("found", "told"))
    forecasts.plot(found, told, ".", color=QUIRE, markersize=3, alpha=0.5)
    forecasts.set_xlim(0, most)
    forecasts.set_ylim(0, most)
    forecasts.set_xlabel("seconds until there was room")
    forecasts.set_ylabel("seconds that a refused request was told")
    forecasts.legend(loc="upper left")
    for name, label, color in (("half_load", "half load", GREY), ("overload", "3 times capacity", QUIRE)):
        seconds = sorted(result[f"first_token_seconds_at_{name}"])
        shares = [(place + 1) / len(seconds) for place in range(len(seconds))]
        waits.plot([1000 * one for one in seconds], shares, color=color, label=label)
    waits.set_xlabel("milliseconds to the first token of requests that were let in")
    waits.set_ylabel("share of them")
    waits.set_xlim(left=0)
    waits.legend(loc="lower right")


def _routing(panels: Sequence[Any], result: Result) -> None:
    """Hit rates by pool and policy, beside one engine's; and how uneven the load was."""
    values = {one["metric"]: one["value"] for one in result["rows"]}
    pools = sorted({int(name.split("_")[1]) for name in values if name.startswith("sessions_")})
    ways = {
        "one_engine": ("one engine, three times the pool", GREY),
        "prefix": ("prefix", QUIRE),
        "least_loaded": ("least-loaded", PEER),
        "round_robin": ("round-robin", OTHER),
    }
    for place, (way, (label, color)) in enumerate(ways.items()):
        xs = [at + 0.2 * (place - 1.5) for at in range(len(pools))]
        rates = [values[f"sessions_{pool}_{way}_hit_rate"] for pool in pools]
        panels[0].bar(xs, rates, 0.18, color=color, label=label)
        if way != "one_engine":
            panels[1].bar(xs, [values[f"sessions_{pool}_{way}_most_load"] or 0 for pool in pools], 0.18, color=color)
    target = _target("routing", "sessions_1024_prefix_most_load")
    panels[1].axhline(target, color=TARGET, linestyle="--", linewidth=1.3, label="target for prefix")
    panels[0].set_ylabel("share of prompt tokens cached")
    panels[1].set_ylabel("largest load of an engine over the mean")
    for axes in panels:
        axes.set_xticks(range(len(pools)), [f"{pool:,} blocks" for pool in pools])
        axes.set_ylim(0, 1.3 * axes.dataLim.ymax)
        axes.legend(loc="upper left", ncols=2)


def _gpu(panels: Sequence[Any], result: Result) -> None:
    """Bars of what has a target, beside it."""
    axes = panels[0]
    rows = [one for one in result["rows"] if one["target"] is not None and one["value"] is not None][::-1]
    for place, one in enumerate(rows):
        axes.barh(place, one["value"], 0.6, color=QUIRE)
        axes.text(max(one["value"], one["target"]), place, f"  {one['value']:g}", va="center")
        axes.plot([one["target"]] * 2, [place - 0.42, place + 0.42], color=TARGET, linewidth=2.2)
    axes.plot([], [], color=TARGET, linewidth=2.2, label="target")
    axes.set_yticks(range(len(rows)), [one["metric"].replace("_", " ") for one in rows])
    axes.set_xlabel("ratio or share")
    axes.set_xlim(0, 1.15 * axes.dataLim.xmax)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right")


def _target(benchmark: str, metric: str) -> float:
    value: float = targets()[benchmark][metric]["target"]
    return value


PICTURES: dict[str, Picture] = {
    "cpu": Picture(
        _cpu,
        1,
        (9, 4.2),
        "Output tokens per second on the CPU, demo model, bfloat16",
        "Bars of Quire's, openvino-genai's and vLLM's speed over the better peer's, for five workloads",
    ),
    "kernels": Picture(
        _kernels,
        1,
        (8, 3.2),
        "Decoding attention on the CPU: 32 sequences of 1,024 tokens, bfloat16",
        "Bars of milliseconds per layer: the floor, Quire with blocks in order and at random, torch",
    ),
    "context": Picture(
        _context,
        2,
        (11, 3.8),
        "What a token costs after a context, demo model on the CPU, one request",
        "Milliseconds per token over the context: a line with the KV cache, steeply rising without",
    ),
    "copies": Picture(
        _copies,
        1,
        (7, 3.8),
        "Copying 256 random blocks of 360 KiB on the CPU",
        "Bars of gigabytes per second of swapping out, swapping in and copying, beside one large copy",
    ),
    "system": Picture(
        _system,
        2,
        (10, 3.8),
        "32 streams, 128 tokens in and 64 out, demo model on the CPU",
        "Bars of tokens per second of the engine in process and the whole system, and CPU seconds of each process",
    ),
    "sharing": Picture(
        _sharing,
        2,
        (10, 3.8),
        "Blocks saved by sharing, beside Figure 15 of the PagedAttention paper",
        "Per cent of blocks saved by samples and beams of 2, 4 and 6 sequences, near the paper's",
    ),
    "kv": Picture(
        _kv,
        2,
        (11, 3.8),
        "Block management",
        "Bars of microseconds beside vLLM's and the targets, and a flat line over the size of the pool",
    ),
    "kv_engine": Picture(
        _kv_engine,
        1,
        (8, 2.8),
        "The books in another process: tokens per second of the demo model",
        "Ratios of tokens per second of each repetition, around 1",
    ),
    "decoding": Picture(
        _decoding,
        1,
        (7, 3.6),
        "Samples and beams of one prompt beside as many greedy answers",
        "Bars of tokens per second of greedy answers, samples and beams at 2, 4 and 6 sequences",
    ),
    "streams": Picture(
        _streams,
        2,
        (10, 3.8),
        "500 streams through one gateway, each at a steady pace",
        "Lines of the gateway's delay and of its CPU time per token over the tokens per second",
    ),
    "overload": Picture(
        _overload,
        2,
        (10, 3.8),
        "Three times as many requests as one engine can serve",
        "Points of seconds told over seconds found, most within a factor of two, and the waits for first tokens",
    ),
    "routing": Picture(
        _routing,
        2,
        (10, 3.8),
        "60 sessions of agents over three engines that compute nothing",
        "Bars of prefix hit rates and of the largest load of an engine, by policy and pool",
    ),
    "gpu": Picture(
        _gpu,
        1,
        (8, 3.6),
        "On the GPU, beside the targets",
        "Bars of ratios on the GPU, each with a mark at its target",
    ),
}


def main(names: Sequence[str]) -> None:
    """Draw what is named, or everything."""
    for name in names or PICTURES:
        picture = draw(name)
        print(f"drawn: {picture.relative_to(ROOT)}" if picture else f"{name}: nothing to draw")


if __name__ == "__main__":
    main(sys.argv[1:])
