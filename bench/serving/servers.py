"""Quire and vLLM as servers under one client: `python -m bench servers [REPETITIONS]`.

The client is Quire's load generator, over HTTP with streaming. Requests have the lengths of the PagedAttention paper's
ShareGPT conversations, answers cut at 128 tokens; their tokens are random, so that no prefix is cached. They arrive at
three rates, and in a closed loop of 32. In each repetition the servers take turns with the same requests, each stopped
while the other is measured.

vLLM runs if QUIRE_VLLM_PYTHON names a Python interpreter that has it. QUIRE_DATA names the folder with
`sharegpt_opt_lengths.csv`; without it, lengths are log-normal with the paper's means.
"""

import os
import random
import sys
import tempfile
from contextlib import ExitStack
from math import log
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.loads.http_server import MODEL, HttpServer, free_address
from bench.loads.memory import DATA_VARIABLE, Lengths, lengths_of
from bench.report.results import Row, publish, row, track
from services.loadgen.clients.target import Target
from services.loadgen.run import measure
from services.loadgen.statistics import Objectives, Summary
from services.loadgen.workload.arrivals import Arrivals, ClosedLoop, Random
from services.loadgen.workload.load import Bounds, Load
from services.loadgen.workload.workloads import Recorded
from services.models.model_store import default_cache, resolve

REPETITIONS = 5
LENGTHS_FILE = "sharegpt_opt_lengths.csv"
# The paper left longer conversations out; these are the means of the others.
MOST_TOKENS, MEAN_PROMPT, MEAN_ANSWER, SIGMA = 2048, 161.31, 337.99, 1.0
MOST_ANSWER = 128
CONTEXT = 6000
VOCABULARY = 49_000
REQUEST_SECONDS = 120.0
# Requests by load: about 20 seconds of arrivals, so that all repetitions take about 20 minutes on two cores.
LOADS = {"rate_1": 20, "rate_2": 40, "rate_4": 64, "closed_32": 64}
PEER_VARIABLE = "QUIRE_VLLM_PYTHON"
METRICS = {"tokens_per_second": "1/s", "end_to_end_ms": "ms", "first_token_ms": "ms"}
RATIOS = {"throughput": "tokens_per_second", "end_to_end": "end_to_end_ms", "first_token": "first_token_ms"}

Figures = dict[str, float | None]
Runs = dict[str, dict[str, list[Figures]]]  # by server and load


class Turn(NamedTuple):
    """One server's run of a load. Repetition 0 warms up."""

    repetition: int
    load: str
    server: str


def main(repetitions: int) -> None:
    """Measure both servers, or Quire alone, and publish."""
    chosen = lengths(DATA_VARIABLE in os.environ, max(LOADS.values()))
    runs: Runs = {}
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-"))) for _ in range(3)]
        file = _write(chosen, folders[2] / "lengths.csv")
        servers = _servers(stack, folders)
        version = _version(servers.get("vllm"))
        for turn in track(_turns(repetitions, list(servers)), "servers"):
            figures = _figures_of(servers[turn.server], turn, file)
            if turn.repetition:
                runs.setdefault(turn.server, {}).setdefault(turn.load, []).append(figures)
    publish("servers", rows_of(runs, version), repetitions, runs=runs, lengths=chosen)


def _servers(stack: ExitStack, folders: list[Path]) -> dict[str, HttpServer]:
    servers = {"quire": stack.enter_context(_quire(folders[0]))}
    if python := os.environ.get(PEER_VARIABLE):
        servers["vllm"] = stack.enter_context(_vllm(python, folders[1]))
    return servers


def _quire(folder: Path) -> HttpServer:
    address = free_address()
    command = [sys.executable, "-m", "services.cli.main", "serve", "--model", MODEL, "--dtype", "bfloat16"]
    command += ["--listen", f"unix:{folder}/gateway.sock", "--http-listen", address, "--metrics-listen", "127.0.0.1:0"]
    # A service that continues after minutes must not take its links for dead.
    command += ["--map-listen", "", "--link-timeout-seconds", "3600", "--seconds-without-kvmanager", "3600"]
    return HttpServer(command, f"http://{address}", folder, {"QUIRE_RUNTIME": str(folder)})


def _vllm(python: str, folder: Path) -> HttpServer:
    address = free_address()
    model = os.environ.get("VLLM_MODEL") or str(resolve(MODEL, default_cache(), lambda *_: None))
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(Path(model).resolve())]
    command += ["--served-model-name", MODEL, "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)]
    command += ["--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    }
    return HttpServer(command, f"http://{address}", folder, environment | dict(os.environ))


def _version(vllm: HttpServer | None) -> str | None:
    if vllm is None:
        return None
    with vllm.turn():
        return f"vLLM {vllm.get('/version')['version']}"


def _turns(repetitions: int, servers: list[str]) -> list[Turn]:
    """Return all turns: a closed loop warms up each server; the order of servers alternates."""
    turns = [Turn(0, "closed_32", server) for server in servers]
    for repetition in range(1, repetitions + 1):
        order = servers if repetition % 2 else servers[::-1]
        turns += [Turn(repetition, load, server) for load in LOADS for server in order]
    return turns


def lengths(recorded: bool, count: int) -> list[Lengths]:
    """Return the lengths of requests: a sample of the paper's, or drawn with their means."""
    draw = random.Random(1)
    if recorded:
        all_of_them = lengths_of(LENGTHS_FILE, "prompt_tokens", "output_tokens")
        chosen = draw.sample([one for one in all_of_them if one.prompt + one.output <= MOST_TOKENS], count)
    else:
        chosen = [Lengths(_log_normal(draw, MEAN_PROMPT), _log_normal(draw, MEAN_ANSWER)) for _ in range(count)]
    return [Lengths(one.prompt, min(one.output, MOST_ANSWER)) for one in chosen]


def _log_normal(draw: random.Random, mean: float) -> int:
    return max(1, min(MOST_TOKENS // 2, round(draw.lognormvariate(log(mean) - SIGMA**2 / 2, SIGMA))))


def _write(chosen: list[Lengths], path: Path) -> Path:
    """Write lengths as a file of `quire bench serve --file`."""
    rows = [f"{one.prompt},{one.output}" for one in chosen]
    path.write_text("\n".join(["prompt_tokens,output_tokens", *rows, ""]))
    return path


def _figures_of(server: HttpServer, turn: Turn, file: Path) -> Figures:
    """Measure one load. Both servers get the same requests in a repetition, and others in the next."""
    number = 1 + turn.repetition * len(LOADS) + list(LOADS).index(turn.load)
    load = Load(Recorded(file), _arrivals(turn), Bounds(requests=LOADS[turn.load]))
    with server.turn() as url:
        target = Target(
            "completions",
            url,
            MODEL,
            vocabulary_size=VOCABULARY,
            prompt_seed=number,
            timeout_seconds=REQUEST_SECONDS,
        )
        return figures_of(measure(target, load, 1, Objectives(), lambda *_: None).summary)


def _arrivals(turn: Turn) -> Arrivals:
    kind, _, number = turn.load.partition("_")
    return Random(float(number), seed=turn.repetition) if kind == "rate" else ClosedLoop(int(number))


def figures_of(summary: Summary) -> Figures:
    """Return the figures of a run; those without a value are None."""
    end, first = summary.latencies.e2e, summary.latencies.ttft
    return {
        "tokens_per_second": round(summary.output_tokens_per_second, 2),
        "end_to_end_ms": round(end.mean * 1e3, 1) if end else None,
        "first_token_ms": round(first.mean * 1e3, 1) if first else None,
        "failed": summary.requests - summary.completed,
    }


def rows_of(runs: Runs, peer: str | None) -> list[Row]:
    """Return the rows of all loads: the figures of each server, and Quire's over vLLM's so that more is better."""
    named = peer or f"vllm did not run: {PEER_VARIABLE} is not set"
    rows = []
    for load in LOADS:
        ours, theirs = (runs.get(server, {}).get(load, []) for server in ("quire", "vllm"))
        for metric, unit in METRICS.items():
            rows.append(row("servers", f"{load}_quire_{metric}", _median(ours, metric), unit))
            rows.append(row("servers", f"{load}_vllm_{metric}", _median(theirs, metric), unit, named))
        for name, metric in RATIOS.items():
            rows.append(row("servers", f"{load}_{name}_over_vllm", _ratio(ours, theirs, metric), "ratio", named))
    for server in ("quire", "vllm"):
        loads = runs.get(server, {}).values()
        failed = sum(one["failed"] or 0 for figures in loads for one in figures) if loads else None
        rows.append(row("servers", f"{server}_failed_requests", failed, "1", None if server == "quire" else named))
    return rows


def _median(runs: list[Figures], metric: str) -> float | None:
    values = [value for one in runs if (value := one[metric]) is not None]
    return round(median(values), 2) if values else None


def _ratio(ours: list[Figures], theirs: list[Figures], metric: str) -> float | None:
    """Return the median of the repetitions' ratios; of times, the peer's over Quire's."""
    pairs = zip(ours, theirs, strict=False)  # without the peer there are none
    values = [(own[metric], other[metric]) for own, other in pairs]
    found = [own / other if metric == "tokens_per_second" else other / own for own, other in values if own and other]
    return round(median(found), 3) if found else None


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS)
