"""Figures of the cost and the savings of block management."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.report.picture import GREY, ON_WHITE, OTHER, PEER, QUIRE, TARGET, Picture, Result, target_of


def _kv(panels: Sequence[Any], result: Result) -> None:
    """Microseconds of frequent operations, with vLLM's and the targets, and their growth with the pool."""
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
    names = [f"{text}\n(target: at most {target_of('kv', metric):g})" for metric, text in shown.items()]
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
    """Ratios of each repetition with their medians, targets, and the interval of equal programs."""
    axes = panels[0]
    rows = {one["metric"]: one for one in result["rows"]}
    shown = {
        "over_grpc_cpu_time_over_in_process": ("CPU time of a token,\ngRPC over in process", "cpu_us_per_token"),
        "over_grpc_tokens_per_second_over_in_process": (
            "tokens per second,\ngRPC over in process",
            "tokens_per_second",
        ),
        "one_ms_added_tokens_per_second_over_none_added": (
            "tokens per second, 1 ms added\nto each answer, over none",
            "tokens_per_second",
        ),
    }
    for place, metric in enumerate(one for one in shown if one in rows):  # earlier results have other rows
        row, of = rows[metric], shown[metric][1]
        above, below = row["terms"]
        ratios = [run[above][of] / run[below][of] for run in result["runs"]]
        axes.fill_betweenx([place - 0.3, place + 0.3], *row["null"], color=GREY, alpha=0.3)
        axes.plot(ratios, [place] * len(ratios), "o", color=QUIRE, alpha=0.6)
        axes.plot([row["value"]] * 2, [place - 0.2, place + 0.2], color="black", linewidth=2)
        axes.text(row["value"], place + 0.23, f"median {row['value']:.3f}", ha="center", va="bottom", bbox=ON_WHITE)
        least = target_of("kv_engine", metric)
        axes.plot([least] * 2, [place - 0.4, place + 0.4], color=TARGET, linestyle="--", linewidth=1.3)
    axes.set_yticks(range(len(shown)), [text for text, _ in shown.values()])
    axes.set_ylim(-0.6, len(shown) - 0.3)
    axes.set_xlabel("ratio; a dot for each repetition, red: the target, grey: equal programs")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)


def _copies(panels: Sequence[Any], result: Result) -> None:
    """Bars of gigabytes per second, with one large copy."""
    axes, seconds = panels[0], result["seconds"]
    large = result["bytes"] / median(seconds["one_large_copy"]) / 1e9
    ways = ("swap_out", "swap_in", "copy")
    for prefix, color, label, shift in (("", QUIRE, "CPU kernels", -0.2), ("torch_", OTHER, "torch backend", 0.2)):
        rates = [result["bytes"] / median(seconds[f"{prefix}{way}"]) / 1e9 for way in ways]
        bars = axes.bar([at + shift for at in range(len(ways))], rates, 0.38, color=color, label=label)
        ink = "black" if color == OTHER else "white"
        axes.bar_label(bars, fmt="%.1f", label_type="center", color=ink, fontweight="bold")
    axes.axhline(large, color=GREY, linewidth=1.3, label=f"one large copy by torch ({large:.1f})")
    least = target_of("copies", "copy_over_one_large_copy")
    axes.axhline(least * large, color=TARGET, linestyle="--", linewidth=1.3, label=f"target: {least:.2f} of it")
    axes.set_xticks(range(len(ways)), ["to the host tier", "from the host tier", "within the cache"])
    axes.set_ylabel("gigabytes copied per second")
    axes.set_ylim(0, 1.45 * axes.dataLim.ymax)
    axes.legend(loc="upper left", ncols=2)


def _sharing(panels: Sequence[Any], result: Result) -> None:
    """Per cent of blocks saved by the number of sequences, with the paper's."""
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
                above = saved >= _on_line(theirs, count)
                place = {"textcoords": "offset points", "ha": "center", "va": "bottom" if above else "top"}
                axes.annotate(f"{saved:.0f}", (count, saved), (0, 6 if above else -6), **place)
        axes.set_title({"alpaca": "Alpaca", "sharegpt": "ShareGPT"}[mix])
        axes.set_xticks((2, 4, 6))
        axes.set_xlim(1.6, 6.4)
        axes.set_ylim(-7, 80)
        axes.set_yticks(range(0, 81, 10))
        axes.set_xlabel("sequences of one prompt")
        axes.set_ylabel("per cent of blocks saved")
    panels[0].legend(loc="upper left", ncols=2)


def _on_line(points: dict[int, float], at: int) -> float:
    """Return the height at `at` of the straight lines through points of rising abscissae."""
    (left, low), (right, high) = (
        max(p for p in points.items() if p[0] <= at),
        min(p for p in points.items() if p[0] >= at),
    )
    return low if left == right else low + (high - low) * (at - left) / (right - left)


# Figure 2 of the PagedAttention paper, per cent: tokens, reserved, internal, external; vLLM's rest has no details.
_FIGURE_2 = {
    "Orca (Max)": (20.4, 13.3, 57.3, 8.9),
    "Orca (Pow2)": (26.8, 17.9, 13.6, 41.6),
    "Orca (Oracle)": (38.2, 25.2, 0.0, 36.6),
    "vLLM": (96.3, 0.0, 0.0, 3.7),
}


def _waste(panels: Sequence[Any], result: Result) -> None:
    """Stacked shares of granted slots, with those of the paper's Figure 2."""
    axes = panels[0]
    values = {one["metric"]: 100 * one["value"] for one in result["rows"]}
    bars = dict(_FIGURE_2)
    mixes = {
        "paper": "Quire,\nthe same lengths",
        "scaled": "Quire, other\nlengths, scaled",
        "as_it_is": "Quire,\nwhole chats",
    }
    for name, title in mixes.items():
        if f"{name}_tokens_share" not in values:  # of earlier results
            continue
        tokens, reserved, internal, lookahead = (
            values[f"{name}_{kind}_share"] for kind in ("tokens", "reserved", "internal", "lookahead")
        )
        bars[title] = (tokens, reserved, internal, lookahead)
    bottoms = [0.0] * len(bars)
    kinds = {"tokens": QUIRE, "reserved": PEER, "internal": GREY, "lookahead, external and others": OTHER}
    for place, (label, color) in enumerate(kinds.items()):
        heights = [shares[place] for shares in bars.values()]
        axes.bar(list(bars), heights, bottom=bottoms, label=label, color=color, width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, shares in enumerate(bars.values()):
        axes.text(place, shares[0] / 2, f"{shares[0]:.4g}", ha="center", va="center", color="white", fontweight="bold")
    axes.set_ylabel("per cent of granted slots")
    axes.set_ylim(0, 120)
    axes.set_yticks(range(0, 101, 20))
    axes.legend(loc="upper left", ncols=4)


PICTURES = {
    "waste": Picture(
        _waste,
        1,
        (9, 4),
        "Contents of KV memory, beside Figure 2 of the PagedAttention paper",
        "Shares of KV memory that hold tokens: Orca 20.4 to 38.2 per cent, vLLM 96.3, Quire above 97",
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
        (8, 3.4),
        "KV manager in another process: CPU time and tokens per second, demo model in bfloat16",
        "Ratios of CPU time and of tokens per second of each repetition, around 1, with intervals of equal programs",
    ),
    "copies": Picture(
        _copies,
        1,
        (7, 3.8),
        "Copying 256 random blocks of 360 KiB on the CPU",
        "Bars of gigabytes per second of swapping out, swapping in and copying, beside one large copy",
    ),
    "sharing": Picture(
        _sharing,
        2,
        (10, 3.8),
        "Blocks saved by sharing, beside Figure 15 of the PagedAttention paper",
        "Per cent of blocks saved by samples and beams of 2, 4 and 6 sequences, near the paper's",
    ),
}
