"""Figures of the engine: speed, kernels, contexts, decoding methods, the GPU."""

from collections.abc import Mapping, Sequence
from statistics import linear_regression, median
from typing import Any

from bench.report.picture import GREY, MILLI, ON_WHITE, OTHER, PEER, QUIRE, TARGET, Picture, Result, target_of

_DEMO_LAYERS = 30


def _cpu(panels: Sequence[Any], result: Result) -> None:
    """Bars of the speed over the better peer's, labelled with tokens per second."""
    axes = panels[0]
    seconds = {name: spent for name, spent in result["seconds"].items() if name in _WORKLOADS}
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
        texts = [_speed(values, name, label) for name in seconds if label in seconds[name]]
        for x, height, text in zip(xs, heights, texts, strict=True):
            axes.text(x, height + 0.015, text, ha="center", va="bottom", fontsize=8, bbox=ON_WHITE)
    axes.axhline(1.0, color=TARGET, linestyle="--", linewidth=1.3, zorder=1.5, label="target: the better peer")
    axes.set_xticks(range(len(seconds)), [_WORKLOADS[name] for name in seconds])
    axes.set_ylabel("speed over the better peer's")
    alone = not any(result["peers"].values())
    medians = "medians of repetitions" + ("; no peer ran" if alone else " in which all take turns")
    axes.set_title(f"Labels: tokens per second, or milliseconds; {medians}")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
    axes.legend(loc="upper right", ncols=4)


_WORKLOADS = {
    "b1": "1 request\n32 in, 64 out",
    "b8": "8 requests\n128 in, 64 out",
    "b32": "32 requests\n128 in, 64 out",
    "b32_short": "32 requests\n16 in, 128 out",
    "ragged": "16 requests\n16 to 2,000 in, 64 out",
    "first_token_128": "ms to first token\n128 in",
    "first_token_1024": "ms to first token\n1,024 in",
    "first_token_4096": "ms to first token\n4,096 in",
}


def _speed(values: Mapping[str, float], workload: str, program: str) -> str:
    if workload.startswith("first_token"):
        return f"{values[f'{workload}_{program}_ms']:,.0f}"
    return f"{values[f'{workload}_{program}_tokens_per_second']:,.0f}"


def _weights(panels: Sequence[Any], result: Result) -> None:
    """Bars of tokens per second, or milliseconds, over bfloat16's speed, for each form of weights and each peer."""
    axes = panels[0]
    seconds = result["seconds"]
    found = {label: spent for label, spent in _WEIGHTS.items() if label in seconds["b1"]}
    width = 0.84 / len(found)
    values = {one["metric"]: one["value"] for one in result["rows"]}
    for place, (label, (shown, color, hatch)) in enumerate(found.items()):
        ran = {at: name for at, name in enumerate(seconds) if label in seconds[name]}  # not all run all workloads
        xs = [at + width * (place - (len(found) - 1) / 2) for at in ran]
        heights = [_over_bfloat16(seconds[name], label) for name in ran.values()]
        axes.bar(xs, heights, 0.92 * width, color=color, hatch=hatch, edgecolor="white", linewidth=0, label=shown)
        for x, height, name in zip(xs, heights, ran.values(), strict=True):
            metric = f"{label}_{name}_{'ms' if name.startswith('first_token') else 'tokens_per_second'}"
            axes.text(x, height + 0.02, f"{values[metric]:,.0f}", ha="center", va="bottom", fontsize=7, rotation=90)
    axes.axhline(1.0, color=GREY, linewidth=1)
    axes.set_xticks(range(len(seconds)), [_WORKLOADS[name] for name in seconds])
    axes.set_ylabel("speed over bfloat16's")
    axes.set_title("Labels: tokens per second, or milliseconds; medians of repetitions in which all take turns")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.25)
    axes.legend(loc="upper right", ncols=4)


def _over_bfloat16(spent: Mapping[str, Sequence[float]], label: str) -> float:
    return median(base / own for base, own in zip(spent["bf16"], spent[label], strict=True))


_WEIGHTS = {
    "bf16": ("Quire, bfloat16", GREY, ""),
    "int8": ("Quire, 8 bits", QUIRE, ""),
    "int4": ("Quire, 4 bits", QUIRE, "///"),
    "openvino_bf16": ("openvino-genai, bfloat16", PEER, "..."),
    "openvino_int8": ("openvino-genai, 8 bits", PEER, ""),
    "openvino_int4": ("openvino-genai, 4 bits", PEER, "///"),
    "llamacpp": ("llama.cpp, 4 bits", OTHER, "///"),
    "vllm": ("vLLM, bfloat16", OTHER, "..."),
}


def _kernels(panels: Sequence[Any], result: Result) -> None:
    """Bars of milliseconds per layer, with the floor and the target."""
    axes, layers = panels[0], result.get("layers", _DEMO_LAYERS)
    shown = {
        "gathered": ("gathered, then torch's SDPA", PEER),
        "contiguous": ("torch's SDPA, contiguous", PEER),
        "paged": ("Quire, random table", QUIRE),
        "identity": ("Quire, blocks in order", QUIRE),
        "floor": ("floor: reading K and V", GREY),
    }
    times = {name: median(result["seconds"][name]) / layers / MILLI for name in shown}
    allowed = times["floor"] / target_of("kernels", "decode_of_the_floor")
    most = 1.15 * max(allowed, *(time for name, time in times.items() if name != "gathered"))
    for place, (name, (_, color)) in enumerate(shown.items()):
        axes.barh(place, min(times[name], most), 0.62, color=color)
        text = f"{times[name]:.1f} ms, beyond the axis" if times[name] > most else f"{times[name]:.2f} ms"
        ink = "black" if color == PEER else "white"
        axes.text(min(times[name], most), place, f"{text}  ", va="center", ha="right", color=ink)
    axes.axvline(allowed, color=TARGET, linestyle="--", linewidth=1.3)
    axes.text(allowed, len(shown) - 0.45, "  target: 0.60 of the floor's speed", color=TARGET, va="bottom")
    axes.set_yticks(range(len(shown)), [text for text, _ in shown.values()])
    axes.set_ylim(-0.5, len(shown))
    axes.set_xlim(0, most)
    axes.set_xlabel("milliseconds per layer, less is better")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)


def _context(panels: Sequence[Any], result: Result) -> None:
    """Two lines of milliseconds per token over the context, and a line fitted to one of them."""
    cached, recomputed = (_medians(result[f"{way}_seconds"]) for way in ("with_cache", "recomputed"))
    values = {one["metric"]: one["value"] for one in result["rows"]}
    left, right = panels
    left.plot(list(cached), list(cached.values()), "o", color=QUIRE, label="Quire, median")
    fitted = {context: time for context, time in cached.items() if context >= 1024}
    line = linear_regression(list(fitted), list(fitted.values()))
    ends = (min(cached), max(cached))
    fit = f"line through 1k to 8k: R² = {values['linear_fit_r2']:.4f}"
    left.plot(ends, [line.intercept + line.slope * end for end in ends], color=GREY, label=fit)
    left.set_title("With the KV cache")
    left.set_ylim(0, 1.15 * max(cached.values()))
    left.legend(loc="lower right")
    for times, color, text in ((cached, QUIRE, "with the KV cache"), (recomputed, PEER, "without: context recomputed")):
        right.plot(list(times), list(times.values()), "o-", color=color)
        context = list(times)[-2]
        right.text(context, times[context] * 1.5, text, color=color, ha="right")
    right.set_title("With the KV cache and without, both axes logarithmic")
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


def _decoding(panels: Sequence[Any], result: Result) -> None:
    """Tokens per second of each decoding method, by the number of sequences."""
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


def _gpu(panels: Sequence[Any], result: Result) -> None:
    """Bars of the rows with a target, each with its target."""
    axes = panels[0]
    rows = [one for one in result["rows"] if one["target"] is not None and one["value"] is not None][::-1]
    for place, one in enumerate(rows):
        axes.barh(place, one["value"], 0.6, color=QUIRE)
        axes.text(max(one["value"], one["target"]), place, f"  {one['value']:g}", va="center")
        axes.plot([one["target"]] * 2, [place - 0.42, place + 0.42], color=TARGET, linewidth=2.2)
    axes.plot([], [], color=TARGET, linewidth=2.2, label="target")
    axes.set_yticks(range(len(rows)), [one["metric"].replace("_", " ") for one in rows])
    axes.set_xlabel("ratio, share or milliseconds")
    axes.set_xlim(0, 1.15 * axes.dataLim.xmax)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right")


PICTURES = {
    "cpu": Picture(
        _cpu,
        1,
        (13, 4.2),
        "Speed on the CPU, demo model, bfloat16",
        "Speeds of Quire, openvino-genai and vLLM, divided by that of the better peer, by workload and class of CPU",
    ),
    "weights": Picture(
        _weights,
        1,
        (13, 4.4),
        "Weights in 8 and 4 bits on the CPU, demo model",
        "Bars of speed over Quire's in bfloat16: Quire, openvino-genai, llama.cpp and vLLM, as their users run them",
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
        "Time per token by length of the context, demo model on the CPU, one request",
        "Milliseconds per token over the context: a line with the KV cache, steeply rising without",
    ),
    "decoding": Picture(
        _decoding,
        1,
        (7, 3.6),
        "Samples and beams of one prompt beside as many greedy answers",
        "Bars of tokens per second of greedy answers, samples and beams at 2, 4 and 6 sequences",
    ),
    "gpu": Picture(
        _gpu,
        1,
        (8, 3.6),
        "On the GPU, beside the targets",
        "Bars of ratios on the GPU, each with a mark at its target",
    ),
}
