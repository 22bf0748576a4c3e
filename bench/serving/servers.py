"""Quire and vLLM as servers under one client: `python -m bench servers [REPETITIONS]`.

The client is Quire's load generator, over HTTP with streaming. Requests have the lengths of the PagedAttention paper's
ShareGPT conversations, from the folder QUIRE_DATA, answers cut at 128 tokens; their tokens are random, so that no
prefix is cached. They arrive four a second, and in a closed loop of 32. In each repetition the servers take turns with
the same requests, Quire once more with others of these lengths, each stopped while the other is measured. Both run in
bfloat16 and compute on all cores; how many processes a server is made of is its own matter.

vLLM runs if QUIRE_VLLM_PYTHON names a Python interpreter that has it, and VLLM_MODEL the folder of its model.
"""

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.loads.engine_worker import BFLOAT16, formats_logged, model_terms
from bench.loads.http_server import MODEL, HttpServer, free_address
from bench.loads.memory import Lengths, paper_lengths
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import Interval, null_interval
from services.loadgen.clients.target import Target
from services.loadgen.run import measure
from services.loadgen.statistics import Objectives, Summary
from services.loadgen.workload.arrivals import Arrivals, ClosedLoop, Random
from services.loadgen.workload.load import Bounds, Load
from services.loadgen.workload.workloads import Recorded

REPETITIONS = 5
MOST_ANSWER = 128
CONTEXT = 6000
VOCABULARY = 49_000
REQUEST_SECONDS = 120.0
# Requests by load: some 20 seconds of each, so that all repetitions take at most 15 minutes on two cores.
LOADS = {"rate_4": 64, "closed_32": 64}
AGAIN = "again"
PEER_VARIABLES = ("QUIRE_VLLM_PYTHON", "VLLM_MODEL")
METRICS = {"tokens_per_second": "1/s", "end_to_end_ms": "ms", "first_token_ms": "ms"}
RATIOS = {"throughput": "tokens_per_second", "end_to_end": "end_to_end_ms", "first_token": "first_token_ms"}
THREADS = os.cpu_count() or 1
CODE = ("blocks", "engine", "kvmanager", "services", "protos", "bench/serving/servers.py", "bench/loads/http_server.py")
# CPU seconds from which a process takes part in serving, and the share of the busiest thread's from which one computes.
_SERVES_SECONDS, _COMPUTES_SHARE = 0.03, 0.5
_OTHER_PROMPTS = 1000
# What vLLM logs of its engine.
_VLLM_FORMATS = re.compile(r"dtype=torch\.(\w+),.*?quantization=(\w+),.*?kv_cache_dtype=(\w+)", re.DOTALL)

Figures = dict[str, float | None]
Runs = dict[str, dict[str, list[Figures]]]  # by arm and load
ThreadSeconds = Mapping[int, Mapping[int, float]]


class Turn(NamedTuple):
    """One arm's run of a load. Repetition 0 warms up. The arm `again` is Quire once more."""

    repetition: int
    load: str
    arm: str


def main(repetitions: int) -> None:
    """Measure both servers, or Quire alone, and publish."""
    chosen = lengths(max(LOADS.values()))
    runs: Runs = {}
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-bench-"))) for _ in range(3)]
        file = _write(chosen, folders[2] / "lengths.csv")
        servers = _servers(stack, folders)
        version = _version(servers.get("vllm"))
        terms = {name: _warmed_up(name, server, file) for name, server in servers.items()}
        for number in repeated(repetitions, "servers", warm_up=False):
            for turn in turns(number, list(servers)):
                figures = _figures_of(servers["quire" if turn.arm == AGAIN else turn.arm], turn, file)
                runs.setdefault(turn.arm, {}).setdefault(turn.load, []).append(figures)
    publish("servers", rows_of(runs, terms, version), repetitions, code=CODE, runs=runs, lengths=chosen)


def missing() -> str | None:
    """Return the variable that vLLM needs and that is not set."""
    return next((one for one in PEER_VARIABLES if not os.environ.get(one)), None)


def _servers(stack: ExitStack, folders: list[Path]) -> dict[str, HttpServer]:
    servers = {"quire": stack.enter_context(_quire(folders[0]))}
    if not missing():
        servers["vllm"] = stack.enter_context(_vllm(folders[1]))
    return servers


def _quire(folder: Path) -> HttpServer:
    address = free_address()
    command = [sys.executable, "-m", "services.cli.main", "serve", "--model", MODEL, "--threads", str(THREADS)]
    command += [text for name, value in BFLOAT16.items() for text in (f"--{name}", value)]
    command += ["--listen", f"unix:{folder}/gateway.sock", "--http-listen", address, "--metrics-listen", "127.0.0.1:0"]
    # A service that continues after minutes must not take its links for dead.
    command += ["--map-listen", "", "--link-timeout-seconds", "3600", "--seconds-without-kvmanager", "3600"]
    return HttpServer(command, f"http://{address}", folder, {"QUIRE_RUNTIME": str(folder)})


def _vllm(folder: Path) -> HttpServer:
    address = free_address()
    python, model = (os.environ[one] for one in PEER_VARIABLES)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(Path(model).resolve())]
    command += ["--served-model-name", MODEL, "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)]
    command += ["--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}
    # By default it leaves a core to its other processes.
    all_cores = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}"}
    return HttpServer(command, f"http://{address}", folder, defaults | dict(os.environ) | all_cores)


def _version(vllm: HttpServer | None) -> str | None:
    if vllm is None:
        return None
    with vllm.turn():
        return f"vLLM {vllm.get('/version')['version']}"


def _warmed_up(name: str, server: HttpServer, file: Path) -> Terms:
    """Warm a server up with a closed loop, and return the terms on which it ran."""
    before = server.thread_seconds()
    _figures_of(server, Turn(0, "closed_32", name), file)
    processes, threads = computing(before, server.thread_seconds())
    formats = formats_logged(server.log()) if name == "quire" else vllm_formats(server.log())
    return model_terms(*formats, work="", threads=threads, processes=processes)


def computing(before: ThreadSeconds, after: ThreadSeconds) -> tuple[int, int]:
    """Return how many processes served meanwhile, and how many threads computed."""
    used = {
        pid: [seconds - before.get(pid, {}).get(thread, 0.0) for thread, seconds in threads.items()]
        for pid, threads in after.items()
    }
    busiest = max(max(seconds) for seconds in used.values())
    serving = sum(sum(seconds) >= _SERVES_SECONDS for seconds in used.values())
    return serving, sum(one >= _COMPUTES_SHARE * busiest for seconds in used.values() for one in seconds)


def vllm_formats(log: str) -> tuple[str, str, str]:
    """Return type, format of weights, and type of the KV cache that vLLM has logged of its engine."""
    found = _VLLM_FORMATS.search(log)
    assert found, f"vLLM did not log its formats:\n{log}"
    dtype, quantization, kv_cache = found.groups()
    return dtype, dtype if quantization == "None" else quantization, dtype if kv_cache == "auto" else kv_cache


def turns(repetition: int, servers: list[str]) -> list[Turn]:
    """Return the turns of a repetition: under each load all servers, Quire twice, in an order that changes."""
    arms = ["quire", AGAIN, *(name for name in servers if name != "quire")]
    return [Turn(repetition, load, arm) for load in LOADS for arm in in_turn(arms, repetition)]


def lengths(count: int) -> list[Lengths]:
    """Return the lengths of requests, a sample of the paper's. Raises DataMissing."""
    return [Lengths(one.prompt, min(one.output, MOST_ANSWER)) for one in paper_lengths(count)]


def _write(chosen: list[Lengths], path: Path) -> Path:
    """Write lengths as a file of `quire bench serve --file`."""
    rows = [f"{one.prompt},{one.output}" for one in chosen]
    path.write_text("\n".join(["prompt_tokens,output_tokens", *rows, ""]))
    return path


def _figures_of(server: HttpServer, turn: Turn, file: Path) -> Figures:
    """Measure one load."""
    load = Load(Recorded(file), _arrivals(turn), Bounds(requests=LOADS[turn.load]))
    with server.turn() as url:
        target = Target(
            "completions",
            url,
            MODEL,
            vocabulary_size=VOCABULARY,
            prompt_seed=prompt_seed(turn),
            timeout_seconds=REQUEST_SECONDS,
        )
        return figures_of(measure(target, load, 1, Objectives(), lambda *_: None).summary)


def prompt_seed(turn: Turn) -> int:
    """Return the seed of the tokens: both servers get the same in a repetition, Quire others when measured again."""
    number = 1 + turn.repetition * len(LOADS) + list(LOADS).index(turn.load)
    return number + _OTHER_PROMPTS * (turn.arm == AGAIN)


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


def rows_of(runs: Runs, terms: dict[str, Terms], peer: str | None) -> list[Row]:
    """Return the rows of all loads: the figures of each server, and Quire's over vLLM's so that more is better."""
    named = peer or f"vllm did not run: {missing()} is not set"
    rows = [one for load in LOADS for one in _rows_of_load(load, runs, terms, named)]
    for server in ("quire", "vllm"):
        loads = runs.get(server, {}).values()
        failed = sum(one["failed"] or 0 for figures in loads for one in figures) if loads else None
        rows.append(row("servers", f"{server}_failed_requests", failed, "1", None if server == "quire" else named))
    return rows


def _rows_of_load(load: str, runs: Runs, terms: dict[str, Terms], peer: str) -> list[Row]:
    ours, again, theirs = (runs.get(arm, {}).get(load, []) for arm in ("quire", AGAIN, "vllm"))
    work = f"{load}, {LOADS[load]} requests of the paper's ShareGPT lengths, answers of at most {MOST_ANSWER}"
    sides = {name: replace(own, work=work) for name, own in terms.items()}
    rows = []
    for server, figures in (("quire", ours), ("vllm", theirs)):
        side = {name: own for name, own in sides.items() if name == server}
        for metric, unit in METRICS.items():
            name, whose = f"{load}_{server}_{metric}", None if server == "quire" else peer
            rows.append(row("servers", name, _median(figures, metric), unit, whose, terms=side))
    for ratio, metric in RATIOS.items():
        name, null = f"{load}_{ratio}_as_servers_over_vllm", _null(ours, again, metric)
        rows.append(row("servers", name, _ratio(ours, theirs, metric), "ratio", peer, terms=sides, null=null))
    return rows


def _median(runs: list[Figures], metric: str) -> float | None:
    values = [value for one in runs if (value := one[metric]) is not None]
    return round(median(values), 2) if values else None


def _null(ours: list[Figures], again: list[Figures], metric: str) -> Interval | None:
    """Return the interval of Quire over itself."""
    pairs = [(one[metric], other[metric]) for one, other in zip(ours, again, strict=True)]
    known = [(one, other) for one, other in pairs if one and other]
    return null_interval(*zip(*known, strict=True)) if known else None


def _ratio(ours: list[Figures], theirs: list[Figures], metric: str) -> float | None:
    """Return the median of the repetitions' ratios; of times, the peer's over Quire's."""
    pairs = zip(ours, theirs, strict=False)  # without the peer there are none
    values = [(own[metric], other[metric]) for own, other in pairs]
    found = [own / other if metric == "tokens_per_second" else other / own for own, other in values if own and other]
    return round(median(found), 3) if found else None


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else REPETITIONS)
