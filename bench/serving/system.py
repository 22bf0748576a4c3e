"""The cost of the whole system: streams through `quire serve`, compared with the same engine in process.

32 requests at once, each of 128 tokens in and 64 out, greedy, in the default type. The client and the in-process
engine are separate processes, each stopped while the other is measured; the CPU use of the idle services is reported.
Each repetition has new prompts, so that nothing is cached.
"""

import json
import random
import sys
import time
from statistics import median
from typing import Any

import psutil

from bench.loads.peer import Worker
from bench.report.results import Row, publish, row, track
from tests.running_quire import RunningQuire, start_quire

REPETITIONS = 7
STREAMS, PROMPT_TOKENS, NEW_TOKENS = 32, 128, 64
DEVICE_BLOCKS = 1024
VOCABULARY = 49_000
ROLES = ("gateway", "kvmanager", "engine")

Run = dict[str, dict[str, float]]


def main() -> None:
    """Measure both, and publish the ratio and the CPU use of each process."""
    quire = start_quire("--model", "demo", "--device-blocks", str(DEVICE_BLOCKS), "--dtype", "auto")
    try:
        runs = _runs(quire)
    finally:
        quire.close()
    publish("system", _rows(runs), REPETITIONS, runs=runs)


def _runs(quire: RunningQuire) -> list[Run]:
    module = [sys.executable, "-m"]
    with (
        Worker("client", [*module, "bench.loads.stream_client", quire.addresses["gateway"]]) as client,
        Worker("engine", [*module, "bench.loads.engine_worker", str(DEVICE_BLOCKS)]) as engine,
    ):
        both = [_one(quire, client, engine, number) for number in track(range(REPETITIONS + 1), "system")]
    return both[1:]  # the first warms up


def _one(quire: RunningQuire, client: Worker, engine: Worker, number: int) -> Run:
    """Measure both once, with the same prompts, in alternating order."""
    line = json.dumps(_work(number))
    ways = [("system", client), ("in_process", engine)]
    figures: Run = {}
    for name, worker in ways if number % 2 else ways[::-1]:
        before, begun = _cpu_seconds(quire), time.perf_counter()
        figures[name] = dict(worker.measure(line))
        wall = time.perf_counter() - begun
        used = {role: seconds - before[role] for role, seconds in _cpu_seconds(quire).items()}
        figures[f"services_meanwhile_{name}"] = used | {"wall_seconds": wall}
    return figures


def _work(number: int) -> list[dict[str, Any]]:
    draw = random.Random(number)
    prompts = [[draw.randrange(10, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(STREAMS)]
    return [{"prompt": prompt, "tokens": NEW_TOKENS} for prompt in prompts]


def _cpu_seconds(quire: RunningQuire) -> dict[str, float]:
    """Return the CPU seconds of each service so far."""
    used = {}
    for role, pid in quire.children().items():
        times = psutil.Process(pid).cpu_times()
        used[role] = times.user + times.system
    return used


def _rows(runs: list[Run]) -> list[Row]:
    tokens = STREAMS * NEW_TOKENS
    rates = {name: [tokens / run[name]["seconds"] for run in runs] for name in ("system", "in_process")}
    ratios = [ours / alone for ours, alone in zip(rates["system"], rates["in_process"], strict=True)]
    rows = [row("system", f"{name}_tokens_per_second", round(median(rates[name]), 1), "1/s") for name in rates]
    rows.append(row("system", "over_in_process", round(median(ratios), 3), "ratio", "the engine in process"))
    meanwhile = [run["services_meanwhile_system"] for run in runs]
    for role in ROLES:
        rows.append(row("system", f"{role}_cpu_seconds", round(median(used[role] for used in meanwhile), 2), "s"))
    for name, who in (("system", "client"), ("in_process", "engine_in_process")):
        used = median(run[name]["cpu_seconds"] for run in runs)
        rows.append(row("system", f"{who}_cpu_seconds", round(used, 2), "s"))
    idle = [run["services_meanwhile_in_process"] for run in runs]
    shares = [sum(used[role] for role in ROLES) / used["wall_seconds"] for used in idle]
    rows.append(row("system", "idle_services_cpu_share", round(median(shares), 4), "share"))
    return rows


if __name__ == "__main__":
    main()
