"""The cost of block management in another process for a real engine: the demo model in bfloat16.

Four arms take turns in each repetition: the core in process, the service over gRPC, that once more, and the service
with a millisecond added to every answer. A cost of some per cent is far below the noise of wall time on a machine whose
cores all processes share. So CPU time of all processes is compared, and the share of time that the engine waits for
answers; the ratios of tokens a second stand beside them, judged by their null interval.
"""

import os

# As in the engine's process, and before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from bench.loads.engine_worker import BFLOAT16, demo_parts, terms_of
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import Interval, null_interval
from bench.serving.overhead import cpu_seconds
from blocks import BlockManager
from engine.run.loop import Engine
from engine.schedule.limits import Limits
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from kvmanager import PoolSpec
from services.engine.block_client import BlockClient, SealedBlocks
from services.engine.startup.assembly import EngineParts
from tests.contract.block_managers import LoopThread
from tests.in_process import InProcessBlocks
from tests.running_quire import RunningService

REPETITIONS = 9


class Work(NamedTuple):
    """Requests that begin together."""

    sequences: int = 16
    prompt_tokens: int = 24
    max_tokens: int = 80


SHORT = Work()
DEVICE_BLOCKS = 512
ADDED_SECONDS = 0.001
WAIT_SECONDS = 30
MICRO = 1e6
WORK = f"B={SHORT.sequences}, {SHORT.prompt_tokens}/{SHORT.max_tokens}"
CODE = (
    *("blocks", "engine", "kvmanager", "protos", "services/engine", "services/kvmanager", "services/wire"),
    *(
        "services/runtime",
        "bench/blocks/kv_engine.py",
    ),
)

Run = dict[str, float]
Runs = Sequence[dict[str, Run]]  # figures of each arm, for each repetition


class _SlowLink(BlockClient):
    """A link that delays what arrives by a millisecond."""

    def _put(self, incoming: Any) -> None:
        self._loop.call_later(ADDED_SECONDS, super()._put, incoming)


ARMS: dict[str, Callable[[EngineParts], Run]] = {
    "in_process": lambda parts: _in_process(parts),
    "over_grpc": lambda parts: over_grpc(parts, BlockClient),
    "again": lambda parts: over_grpc(parts, BlockClient),
    "one_ms_added": lambda parts: over_grpc(parts, _SlowLink),
}


def main() -> None:
    """Measure, and publish the costs."""
    parts = demo_parts(DEVICE_BLOCKS, **BFLOAT16)
    runs = []
    for number in repeated(REPETITIONS, "Engine"):
        run = {name: ARMS[name](parts) for name in in_turn(list(ARMS), number)}
        if number:
            runs.append(run)
    publish("kv_engine", rows_of(runs, _terms(parts)), REPETITIONS, code=CODE, runs=runs)


def _terms(parts: EngineParts) -> dict[str, Terms]:
    own = terms_of(parts, WORK)
    return {name: own if name == "in_process" else replace(own, processes=2) for name in ARMS}


def rows_of(runs: Runs, terms: dict[str, Terms]) -> list[Row]:
    """Return the figures of each arm, and their ratios."""
    rows = []
    for name in ("in_process", "over_grpc", "one_ms_added"):
        for metric, unit in (("tokens_per_second", "tokens/s"), ("cpu_us_per_token", "us")):
            value = round(median(_column(runs, name, metric)), 2)
            rows.append(row("kv_engine", f"{name}_{metric}", value, unit, terms={name: terms[name]}))
    ratios = (
        ("over_grpc_cpu_time_over_in_process", "cpu_us_per_token", "over_grpc", "in_process"),
        ("over_grpc_tokens_per_second_over_in_process", "tokens_per_second", "over_grpc", "in_process"),
        ("one_ms_added_tokens_per_second_over_none_added", "tokens_per_second", "one_ms_added", "over_grpc"),
    )
    return [*rows, *(_ratio(runs, terms, *one) for one in ratios), *_shares(runs, terms)]


def _ratio(runs: Runs, terms: dict[str, Terms], metric: str, of: str, above: str, below: str) -> Row:
    ratios = [one / other for one, other in zip(_column(runs, above, of), _column(runs, below, of), strict=True)]
    sides = {name: terms[name] for name in (above, below)}
    peer = below.replace("_", " ")
    return row("kv_engine", metric, round(median(ratios), 4), "ratio", peer, terms=sides, null=_null(runs, of))


def _null(runs: Runs, metric: str) -> Interval:
    return null_interval(_column(runs, "over_grpc", metric), _column(runs, "again", metric))


def _shares(runs: Runs, terms: dict[str, Terms]) -> list[Row]:
    """Return the shares of sequences left out of a step, and of time in which all of them waited for answers."""
    return [
        row(
            *("kv_engine", f"{name}_{metric}", round(median(_column(runs, name, metric)), 4), "share"),
            terms={name: terms[name]},
        )
        for name in ("over_grpc", "one_ms_added")
        for metric in ("left_out_share", "waiting_share")
    ]


def _column(runs: Runs, arm: str, metric: str) -> list[float]:
    return [run[arm][metric] for run in runs]


def _in_process(parts: EngineParts) -> Run:
    return _run(parts, InProcessBlocks(parts.scheduler.capacity), lambda: None, lambda: 0.0)


def over_grpc(parts: EngineParts, link_type: type[BlockClient], work: Work = SHORT) -> Run:
    """Run the work with the KV manager as a process; the engine keeps its blocks if its parts do."""
    service = RunningService("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "0")
    loop, news = LoopThread(), threading.Event()
    capacity = parts.scheduler.capacity
    sizes = capacity.block_size, capacity.device_blocks, capacity.host_blocks
    spec = PoolSpec("engine", 1, parts.loaded.fingerprint, *sizes, windows=capacity.windows)
    sealed = SealedBlocks(parts.proof.seals) if parts.proof else None
    link, task = loop.run(_begin(link_type, service.address, spec, news.set, sealed))
    try:
        while not link.ready:
            link.receive()
            news.wait(0.01)

        def wait() -> None:
            assert news.wait(WAIT_SECONDS), "no answer came"
            news.clear()

        return _run(parts, link, wait, lambda: cpu_seconds(service.process.pid), work)
    finally:
        loop.run(_end(task))
        loop.close()
        service.close()


async def _begin(
    link_type: type[BlockClient], address: str, spec: PoolSpec, wake: Callable[[], None], sealed: SealedBlocks | None
) -> tuple[BlockClient, "asyncio.Task[None]"]:
    link = link_type(address, spec, wake, sealed=sealed)
    return link, asyncio.create_task(link.run())


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _run(
    parts: EngineParts,
    blocks: BlockManager,
    wait: Callable[[], None],
    others: Callable[[], float],
    work: Work = SHORT,
) -> Run:
    """Generate with a new scheduler and an empty pool; return rate, CPU time and shares.

    `others` returns the CPU seconds so far of other processes that take part.
    """
    scheduler = Scheduler(replace(parts.scheduler.capacity), Limits())
    engine = Engine(scheduler, parts.runner, blocks, time.monotonic, parts.proof)
    for number in range(work.sequences):
        prompt = tuple(1000 + 37 * number + token for token in range(work.prompt_tokens))
        scheduler.requests.submit(Request(f"r{number}", prompt, Sampling(temperature=0.0), Stopping(work.max_tokens)))
    begun, used = time.perf_counter(), time.process_time() + others()
    waited = _run_to_the_end(engine, wait)
    seconds, used = time.perf_counter() - begun, time.process_time() + others() - used
    totals = scheduler.totals
    return {
        "tokens_per_second": totals.generated_tokens / seconds,
        "cpu_us_per_token": used / totals.generated_tokens * MICRO,
        "cpu_us_per_computed_token": used / totals.computed_tokens * MICRO,
        "left_out_share": totals.skipped / (totals.planned + totals.skipped),
        "waiting_share": waited / seconds,
    }


def _run_to_the_end(engine: Engine, wait: Callable[[], None]) -> float:
    """Return the seconds in which no sequence could run, because answers were missing."""
    waited = 0.0
    while not engine.scheduler.empty:
        turn = engine.turn()
        assert engine.last_failure is None
        if not turn.progressed:
            begun = time.perf_counter()
            wait()
            waited += time.perf_counter() - begun
    return waited


if __name__ == "__main__":
    main()
