"""The cost of the whole system: streams through `quire serve`, compared with the same engine in process.

32 requests at once, each of 128 tokens in and 64 out, greedy, with as many threads in both; with weights in bfloat16,
and then in 4 bits, whose steps are shorter.
The client and the in-process engine are separate processes, each stopped while the other is measured; the CPU use of
the idle services is reported. The system is measured twice in each repetition. Every turn has new prompts, so that
nothing is cached.
"""

import json
import os
import random
import sys
import time
from statistics import median
from typing import Any

import psutil

from bench.loads.engine_worker import BFLOAT16, model_terms
from bench.loads.peer import Worker
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from quire.v1 import gateway_pb2
from tests.running_quire import RunningQuire, start_quire

REPETITIONS = 7
STREAMS, PROMPT_TOKENS, NEW_TOKENS = 32, 128, 64
DEVICE_BLOCKS = 1024
VOCABULARY = 49_000
ROLES = ("gateway", "kvmanager", "engine")
THREADS = os.cpu_count() or 1
SETTINGS = {"": {**BFLOAT16, "threads": THREADS}, "int4_": {**BFLOAT16, "weights": "int4", "threads": THREADS}}
WORK = f"B={STREAMS}, {PROMPT_TOKENS}/{NEW_TOKENS}"
ARMS = ("system", "again", "in_process")
CODE = (
    *(
        "blocks",
        "engine",
        "kvmanager",
        "services",
        "protos",
        "bench/serving/system.py",
        "bench/loads/engine_worker.py",
    ),
    *("bench/loads/stream_client.py",),
)

Run = dict[str, dict[str, float]]


def main() -> None:
    """Measure both, and publish the ratio and the CPU use of each process."""
    rows: list[Row] = []
    every: dict[str, list[Run]] = {}
    for weights, settings in SETTINGS.items():
        options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
        quire = start_quire("--model", "demo", "--device-blocks", str(DEVICE_BLOCKS), *options)
        try:
            every[weights or "bf16"], terms = _runs(quire, settings)
        finally:
            quire.close()
        rows += rows_of(every[weights or "bf16"], terms, weights)
    publish("system", rows, REPETITIONS, code=CODE, runs=every)


def _runs(quire: RunningQuire, settings: dict[str, Any]) -> tuple[list[Run], dict[str, Terms]]:
    module = [sys.executable, "-m"]
    engine_command = [*module, "bench.loads.engine_worker", str(DEVICE_BLOCKS), json.dumps(settings)]
    with (
        Worker("client", [*module, "bench.loads.stream_client", quire.addresses["gateway"]]) as client,
        Worker("engine", engine_command) as engine,
    ):
        runs = [_one(quire, client, engine, number) for number in repeated(REPETITIONS, "system")]
        terms = {"system": _terms(quire), "in_process": engine.terms(WORK)}
    return runs[1:], terms  # the first warms up


def _terms(quire: RunningQuire) -> Terms:
    """Return what the running engine says of itself."""
    model = quire.gateway.GetModel(gateway_pb2.GetModelRequest(), timeout=60)
    formats = (model.dtype, *model.weights, *model.kv_dtypes)
    return model_terms(*formats, work=WORK, threads=THREADS, processes=len(quire.children()))


def _one(quire: RunningQuire, client: Worker, engine: Worker, number: int) -> Run:
    """Measure all arms once, in turn; the prompts of the arm `again` are others, of equal lengths."""
    workers = {"system": client, "again": client, "in_process": engine}
    figures: Run = {}
    for name in in_turn(ARMS, number):
        line = json.dumps(_work(2 * number + (name == "again")))
        before, begun = _cpu_seconds(quire), time.perf_counter()
        figures[name] = dict(workers[name].measure(line))
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


def rows_of(runs: list[Run], terms: dict[str, Terms], weights: str = "") -> list[Row]:
    """Return speeds, their ratio, and the CPU time of each process; `weights` is the beginning of their names."""
    tokens = STREAMS * NEW_TOKENS
    rates = {name: [tokens / run[name]["seconds"] for run in runs] for name in ARMS}
    ratios = [ours / alone for ours, alone in zip(rates["system"], rates["in_process"], strict=True)]
    null = null_interval(rates["system"], rates["again"])
    rows = [
        row(
            "system",
            f"{weights}{name}_tokens_per_second",
            round(median(rates[name]), 1),
            "1/s",
            terms={name: terms[name]},
        )
        for name in terms
    ]
    ratio = round(median(ratios), 3)
    rows.append(
        row("system", f"{weights}over_in_process", ratio, "ratio", "the engine in process", terms=terms, null=null)
    )
    return [*rows, *_cpu_rows(runs, terms, weights)]


def _cpu_rows(runs: list[Run], terms: dict[str, Terms], weights: str) -> list[Row]:
    system, in_process = ({name: terms[name]} for name in ("system", "in_process"))
    meanwhile = [run["services_meanwhile_system"] for run in runs]
    used = {role: (median(one[role] for one in meanwhile), system) for role in ROLES}
    used["client"] = median(run["system"]["cpu_seconds"] for run in runs), system
    used["engine_in_process"] = median(run["in_process"]["cpu_seconds"] for run in runs), in_process
    idle = [run["services_meanwhile_in_process"] for run in runs]
    share = median(sum(one[role] for role in ROLES) / one["wall_seconds"] for one in idle)
    return [
        *(
            row("system", f"{weights}{who}_cpu_seconds", round(value, 2), "s", terms=side)
            for who, (value, side) in used.items()
        ),
        row("system", f"{weights}idle_services_cpu_share", round(share, 4), "share", terms=system),
    ]


if __name__ == "__main__":
    main()
