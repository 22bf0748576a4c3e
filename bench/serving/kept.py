"""Blocks that outlive their engine: how soon a killed engine is back, and what its cache is worth then.

*Starts*: `quire serve` on the demo model, with and without kept blocks. Its engine is killed after a prompt of 2,000
tokens; measured are the seconds until its successor is ready, and then until the first token of the same prompt.

*Hits*: the conversation trace of Mooncake, on an engine that computes nothing and is killed after each thousand
requests, beside one that is not killed. Both keep their blocks: what writing seals costs an engine without a model
changes how its requests overlap, and so its hits.
"""

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import psutil

from bench.loads.memory import DATA_VARIABLE, DataMissing
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import Interval, null_interval
from quire.v1 import gateway_pb2
from services.loadgen.clients.target import Target
from services.loadgen.run import completed_by, describe, measure
from services.loadgen.statistics import Objectives
from services.loadgen.workload.arrivals import TraceTimes
from services.loadgen.workload.load import Bounds, Load
from services.loadgen.workload.selection import Selection
from services.loadgen.workload.workloads import Recorded
from services.models.model_store import default_cache, resolve
from tests.running_quire import START_SECONDS, RunningQuire, RunningService, start_quire

REPETITIONS = 11
PREFIX_TOKENS = 2000
BLOCKS = 2048
ARMS = {"kept": "memory", "private": "off", "again": "off"}
TRACE = "mooncake_conversation.jsonl"
PARTS, REQUESTS = 4, 1000
TRACE_BLOCKS = 65536
SPEEDUP = 10.0
CODE = ("blocks", "engine", "kvmanager", "services", "protos", "bench/serving/kept.py", "bench/loads/null_engine.py")

Figures = dict[str, float]


def main() -> None:
    """Measure both, and publish the results."""
    runs: list[dict[str, Figures]] = []
    with ExitStack() as stack:
        served = {name: _served(stack, kept) for name, kept in ARMS.items()}
        for number in repeated(REPETITIONS, "Starts"):
            run = {name: _restarted(served[name], number) for name in in_turn(list(ARMS), number)}
            if number:
                runs.append(run)
    hits = {name: _hit_rate(killed=name == "killed") for name in ("undisturbed", "killed")}
    rows = [*_start_rows(runs), *_hit_rows(hits)]
    publish("kept", rows, REPETITIONS, code=CODE, runs=runs, hits=hits)


# Starts


def _served(stack: ExitStack, kept: str) -> RunningQuire:
    options = ("--model", "demo", "--device-blocks", str(BLOCKS), "--keep-blocks", kept)
    restarts = ("--max-restarts", "1000", "--restart-reset-seconds", "0")
    return stack.enter_context(closing(start_quire(*options, *restarts)))


def _restarted(served: RunningQuire, number: int) -> Figures:
    """Kill the engine after a prompt; return seconds until its successor is ready, and to the prompt's first token."""
    _first_token(served, number)
    seen = len(served.output.lines)
    begun = time.perf_counter()
    psutil.Process(served.children()["engine"]).send_signal(signal.SIGKILL)
    served.output.wait_for("engine is ready", START_SECONDS, seen)
    ready = time.perf_counter() - begun
    served.output.wait_for("serves demo", START_SECONDS, seen)
    return {"ready_seconds": ready, "first_token_seconds": _first_token(served, number)}


def _first_token(served: RunningQuire, number: int) -> float:
    request = gateway_pb2.GenerateRequest(sampling={"temperature": 0.0}, stopping={"max_tokens": 1})  # type: ignore[arg-type]
    request.prompt.token_ids.ids.extend(1000 + (37 * number + token) % 20000 for token in range(PREFIX_TOKENS))
    begun = time.perf_counter()
    served.generate(request)
    return time.perf_counter() - begun


def _start_rows(runs: Sequence[dict[str, Figures]]) -> list[Row]:
    terms = Terms(threads=os.cpu_count() or 1, processes=3, work=f"a prompt of {PREFIX_TOKENS} tokens")
    rows = []
    for metric in ("ready_seconds", "first_token_seconds"):
        columns = {name: [run[name][metric] for run in runs] for name in ARMS}
        for name in ("kept", "private"):
            rows.append(row("kept", f"{name}_{metric}", round(median(columns[name]), 3), "s", terms={name: terms}))
        ratio = median(one / other for one, other in zip(columns["kept"], columns["private"], strict=True))
        null: Interval = null_interval(columns["private"], columns["again"])
        sides = {"kept": terms, "private": terms}
        name = f"{metric.removesuffix('_seconds')}_over_private"
        rows.append(row("kept", name, round(ratio, 4), "ratio", "private memory", terms=sides, null=null))
    return rows


# Hits


@dataclass(frozen=True)
class _Engine:
    """An engine without a model that can be started again."""

    folder: str
    kvmanager: str

    def start(self) -> RunningService:
        """Start it, and wait until it is ready."""
        model = resolve("demo", default_cache(), lambda *_: None)
        engine = RunningService(
            *("engine", "--listen", f"unix:{self.folder}/engine.sock", "--kvmanager", self.kvmanager),
            *("--model", str(model), "--device-blocks", str(TRACE_BLOCKS), "--engine-id", "engine"),
            *("--keep-blocks", f"{self.folder}/kept"),
            *("--max-waiting", str(2 * REQUESTS)),
            module="bench.loads.null_engine",
        )
        engine.output.wait_for("engine is ready")
        return engine


def _hit_rate(*, killed: bool) -> float:
    """Return the share of prompt tokens that were cached; with `killed`, the engine is killed after each part."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        manager = RunningService("kvmanager", "--listen", f"unix:{folder}/kvmanager.sock")
        stack.enter_context(closing(manager))
        one = _Engine(folder, manager.address)
        engine = one.start()
        stack.callback(lambda: engine.close())  # the last one, also where a load fails
        # The trace's bursts, ten times as fast, are more than a gateway takes by default.
        bounds = "--max-requests", str(2 * REQUESTS), "--max-queued-tokens", "200000000"
        listen = "--listen", f"unix:{folder}/gateway.sock", "--engines", engine.address
        gateway = RunningService("gateway", *listen, *bounds)
        stack.enter_context(closing(gateway))
        cached = prompts = 0.0
        for part in _parts(folder):
            gateway.output.wait_for("gateway is ready")
            target = Target("grpc", gateway.address, prompt_seed=1)
            load = Load(Recorded(part, Selection(cap_output=8), 1), TraceTimes(SPEEDUP), Bounds())
            run = measure(completed_by(target, describe(target)), load, 1, Objectives(), lambda *_: None)
            assert run.summary.completed == run.summary.requests, run.summary.failures
            cached, prompts = cached + (run.summary.cached_tokens or 0), prompts + run.summary.input_tokens
            if killed:
                engine = _killed(one, engine, gateway)
        return cached / prompts


def _killed(one: _Engine, engine: RunningService, gateway: RunningService) -> RunningService:
    seen = len(gateway.output.lines)
    engine.kill()
    successor = one.start()
    gateway.output.wait_for("serves", START_SECONDS, seen)
    return successor


def _parts(folder: str) -> Iterator[Path]:
    """Yield files with a thousand requests each."""
    data = os.environ.get(DATA_VARIABLE, "")
    if not data:
        raise DataMissing(f"{DATA_VARIABLE} names no folder with {TRACE}")
    with (Path(data) / TRACE).open() as lines:
        for number in range(PARTS):
            part = Path(folder) / f"part-{number}.jsonl"
            part.write_text("".join(islice(lines, REQUESTS)))
            yield part


def _hit_rows(hits: dict[str, float]) -> list[Row]:
    terms = Terms(processes=3, work=f"{PARTS * REQUESTS} requests of {TRACE}", start="cold")  # no model computes
    alone = [
        row("kept", f"{name}_hit_rate", round(rate, 4), "share", terms={name: terms}) for name, rate in hits.items()
    ]
    over = round(hits["killed"] / hits["undisturbed"], 4)
    sides = dict.fromkeys(hits, terms)
    return [*alone, row("kept", "hit_rate_over_undisturbed", over, "ratio", "an engine that lives", terms=sides)]


if __name__ == "__main__":
    main()
