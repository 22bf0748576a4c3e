"""Figures of the whole system behind a gateway."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.report.picture import GREY, MILLI, OTHER, PEER, QUIRE, TARGET, Picture, Result, target_of


def _system(panels: Sequence[Any], result: Result) -> None:
    """Both rates with all repetitions, and the CPU time of each process."""
    left, right = panels
    values = {one["metric"]: one["value"] for one in result["rows"]}
    runs = (
        result["runs"] if isinstance(result["runs"], list) else result["runs"]["bf16"]
    )  # a list before there were 4 bits
    tokens = values["system_tokens_per_second"] * median(run["system"]["seconds"] for run in runs)
    shown = {"in_process": ("engine in process", GREY), "system": ("whole system", QUIRE)}
    for place, (name, (_, color)) in enumerate(shown.items()):
        rate = values[f"{name}_tokens_per_second"]
        left.bar(place, rate, 0.6, color=color)
        left.text(place, rate / 2, f"{rate:,.0f}", ha="center", va="center", color="white", fontweight="bold")
        dots = [tokens / run[name]["seconds"] for run in runs]
        beside = [place + 0.05 * (number - len(dots) // 2) for number in range(len(dots))]
        left.plot(beside, dots, "o", color="black", markersize=4, alpha=0.7)
    least = target_of("system", "over_in_process")
    height = least * values["in_process_tokens_per_second"]
    left.axhline(
        height, color=TARGET, linestyle="--", linewidth=1.3, label=f"target: {least:.2f} of the engine in process"
    )
    left.set_ylim(0, 1.2 * left.dataLim.ymax)
    left.legend(loc="upper right")
    left.set_xticks(range(len(shown)), [text for text, _ in shown.values()])
    left.set_ylabel("tokens per second, all streams together")
    left.set_title("Speed; a dot for each repetition")
    roles = {"engine_in_process": GREY, "engine": QUIRE, "gateway": QUIRE, "kvmanager": QUIRE, "client": QUIRE}
    for place, (role, color) in enumerate(reversed(roles.items())):
        used = values[f"{role}_cpu_seconds"]
        right.barh(place, used, 0.62, color=color)
        right.text(used, place, f"  {used:.2f} s", va="center")
    names = {"kvmanager": "KV manager", "engine_in_process": "engine in process"}
    right.set_yticks(range(len(roles)), [names.get(role, role) for role in reversed(roles)])
    right.set_xlim(0, 1.2 * right.dataLim.xmax)
    right.set_xlabel("CPU seconds for 32 streams")
    right.set_title("CPU time; the lower four are the whole system")
    right.grid(axis="y", visible=False)


def _servers(panels: Sequence[Any], result: Result) -> None:
    """Throughput and mean times of both servers under each load, with the ratios."""
    values = {one["metric"]: one["value"] for one in result["rows"]}
    loads = {"rate_4": "4 a second", "closed_32": "32 at a time"}
    shown = (
        ("tokens_per_second", "throughput", "Throughput", "output tokens per second", 1.0),
        ("end_to_end_ms", "end_to_end", "End to end", "seconds, mean", MILLI),
        ("first_token_ms", "first_token", "First token", "seconds, mean", MILLI),
    )
    for axes, (metric, ratio, title, unit, scale) in zip(panels, shown, strict=True):
        tops = [0.0] * len(loads)
        for server, label, color, beside in (("quire", "Quire", QUIRE, -0.19), ("vllm", "vLLM", PEER, 0.19)):
            heights = [(values.get(f"{load}_{server}_{metric}") or 0.0) * scale for load in loads]
            tops = [max(pair) for pair in zip(tops, heights, strict=True)]
            axes.bar([place + beside for place in range(len(loads))], heights, 0.36, color=color, label=label)
        for place, load in enumerate(loads):
            if over := values.get(f"{load}_{ratio}_as_servers_over_vllm"):
                axes.text(place, tops[place], f"{over:.2f}", ha="center", va="bottom", fontweight="bold")
        axes.set_xticks(range(len(loads)), loads.values())
        axes.set_ylabel(unit)
        axes.set_title(f"{title}; above: Quire over vLLM")
        axes.set_ylim(0, 1.3 * max(*tops, MILLI))
        axes.legend(loc="upper left", ncols=2)


def _streams(panels: Sequence[Any], result: Result) -> None:
    """The delay and the CPU time per token at each pace."""
    levels = result["levels"]
    rates = [level["tokens_per_second"] for level in levels]
    delays, shares = panels
    delays.plot(rates, [level["delay_p50_ms"] for level in levels], "o-", color=QUIRE, label="median")
    delays.plot(rates, [level["delay_p99_ms"] for level in levels], "s-", color=PEER, label="99th percentile")
    delays.plot(
        rates,
        [1000 / level["tokens_per_second_of_a_stream"] for level in levels],
        ":",
        color=GREY,
        label="time of a step",
    )
    delays.set_ylim(0, 1.15 * delays.dataLim.ymax)
    delays.set_title("Delay")
    shares.set_title("CPU time of the gateway")
    delays.set_ylabel("milliseconds from engine to client")
    shares.plot(rates, [level["gateway_cpu_us_per_token"] for level in levels], "o-", color=QUIRE)
    shares.set_ylabel("microseconds per token")
    shares.set_ylim(0, 1.2 * shares.dataLim.ymax)
    for axes in panels:
        axes.set_xlabel("tokens per second, all 500 streams together")
        axes.set_xlim(0.9 * min(rates), 1.05 * max(rates))
    delays.legend(loc="upper right")


def _overload(panels: Sequence[Any], result: Result) -> None:
    """Retry-After of rejected requests over the time until there was room, and times to first token of the others."""
    forecasts, waits = panels
    points = result["forecasts"]
    most = 1.1 * max(max(one["predicted"], one["actual"]) for one in points)
    forecasts.fill_between(
        [0, most], [0, most / 2], [0, 2 * most], color=GREY, alpha=0.2, label="within a factor of two"
    )
    actual, predicted = ([one[name] for one in points] for name in ("actual", "predicted"))
    forecasts.plot(actual, predicted, ".", color=QUIRE, markersize=3, alpha=0.5)
    forecasts.set_xlim(0, most)
    forecasts.set_ylim(0, most)
    forecasts.set_xlabel("seconds until there was room")
    forecasts.set_ylabel("Retry-After, seconds")
    forecasts.set_title("Rejected requests: forecast and truth")
    forecasts.legend(loc="upper left")
    for name, label, color in (("half_load", "half load", GREY), ("overload", "3 times capacity", QUIRE)):
        seconds = sorted(result[f"first_token_seconds_at_{name}"])
        shares = [(place + 1) / len(seconds) for place in range(len(seconds))]
        waits.plot([1000 * one for one in seconds], shares, color=color, label=label)
    waits.set_xlabel("milliseconds to the first token")
    waits.set_ylabel("share of requests")
    waits.set_title("Admitted requests")
    waits.set_xlim(left=0)
    waits.legend(loc="upper left")


def _routing(panels: Sequence[Any], result: Result) -> None:
    """Hit rates by pool and policy, with one engine's; and the largest load of an engine."""
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
            beside = [x - 0.1 for x in xs]
            panels[1].bar(
                beside, [values[f"sessions_{pool}_{way}_most_load"] or 0 for pool in pools], 0.18, color=color
            )
    target = target_of("routing", "sessions_1024_prefix_most_load")
    panels[1].axhline(target, color=TARGET, linestyle="--", linewidth=1.3, label="target for prefix")
    panels[0].set_title("Prefix hit rate, by blocks of each pool")
    panels[1].set_title("Balance")
    panels[0].set_ylabel("share of prompt tokens cached")
    panels[1].set_ylabel("largest load of an engine over the mean")
    for axes in panels:
        axes.set_xticks(range(len(pools)), [f"{pool:,} blocks" for pool in pools])
        axes.set_ylim(0, 1.3 * axes.dataLim.ymax)
        axes.legend(loc="upper left", ncols=2)


def _overhead(panels: Sequence[Any], result: Result) -> None:
    """Stacked bars of each process's microseconds a token, of this commit and an earlier one."""
    who = {"earlier": "before", "quire": f"{result['commit'][:7]}"}
    names = [name for name in who if name in result["runs"]]
    for axes, streams in zip(panels, ("1", "32"), strict=True):
        tokens = int(streams) * result["tokens"][streams]
        for place, name in enumerate(names):
            runs, left = result["runs"][name][streams], 0.0
            for role, color in (("gateway", QUIRE), ("engine", PEER), ("kvmanager", OTHER)):
                width = median(run[role] for run in runs) / tokens * 1e6
                axes.barh(place, width, 0.6, left=left, color=color, label=None if place else role)
                if width > 0.04 * axes.get_xlim()[1]:
                    ink = "white" if color == QUIRE else "black"
                    axes.text(left + width / 2, place, f"{width:,.0f}", ha="center", va="center", color=ink)
                left += width
        axes.set_yticks(range(len(names)), [who[name] for name in names])
        axes.set_title(f"{streams} stream{'s' if streams != '1' else ''}")
        axes.set_xlabel("microseconds of CPU a token")
        axes.set_ylim(-0.5, len(names) + 0.2)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        axes.legend(loc="upper right", ncols=3)


PICTURES = {
    "overhead": Picture(
        _overhead,
        2,
        (11, 2.8),
        "The CPU's time outside the kernels, for each token",
        "Bars of microseconds of gateway, engine and KV manager for each token, before and now",
    ),
    "system": Picture(
        _system,
        2,
        (10, 3.8),
        "32 streams, 128 tokens in and 64 out, demo model in bfloat16 on the CPU",
        "Bars of tokens per second of the engine in process and the whole system, and CPU seconds of each process",
    ),
    "servers": Picture(
        _servers,
        3,
        (13, 3.8),
        "Quire and vLLM's server under one client: ShareGPT lengths, answers cut at 128 tokens, demo model in bfloat16",
        "Bars of throughput, mean end to end and mean time to the first token of both servers, by load",
    ),
    "streams": Picture(
        _streams,
        2,
        (10, 3.8),
        "500 streams of a paced tiny model through one gateway",
        "Lines of the gateway's delay and of its CPU time per token over the tokens per second",
    ),
    "overload": Picture(
        _overload,
        2,
        (10, 3.8),
        "Requests at three times the capacity of one engine, a paced tiny model",
        "Points of Retry-After over the time until there was room, most within a factor of two; times to first token",
    ),
    "routing": Picture(
        _routing,
        2,
        (10, 3.8),
        "Routing policies: 60 sessions of agents over three engines",
        "Bars of prefix hit rates and of the largest load of an engine, by policy and pool",
    ),
}
