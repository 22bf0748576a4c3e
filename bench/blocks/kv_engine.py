"""The cost of block management in another process for a real engine: tokens per second on the demo model.

Three arms run one after the other in each repetition: the core in process, the service over gRPC, and the service with
a millisecond added to every answer.
"""

import os

# As in the engine's process, and before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median, quantiles

from rich.progress import track

from bench.report.results import publish, row
from blocks import BlockManager, StepResult
from engine.run.loop import Engine
from engine.schedule.limits import Limits
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from kvmanager import PoolSpec
from services.engine.block_client import BlockClient
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts, assemble
from services.models.model_store import default_cache, resolve
from tests.contract.block_managers import LoopThread
from tests.in_process import InProcessBlocks
from tests.running_quire import RunningService

REPETITIONS = 7
SEQUENCES, PROMPT_TOKENS, MAX_TOKENS = 16, 24, 40
ADDED_SECONDS = 0.001
WAIT_SECONDS = 30


class _SlowLink(BlockClient):
    """A link that delays answers by a millisecond."""

    def _put(self, incoming: object) -> None:
        put = super()._put
        if isinstance(incoming, StepResult):
            self._loop.call_later(ADDED_SECONDS, put, incoming)
        else:
            put(incoming)  # type: ignore[arg-type]


def main() -> None:
    """Measure, and publish the ratios."""
    model = str(resolve("demo", default_cache(), lambda *_: None))
    parts = assemble(EngineSettings(model=model, device_blocks=512))
    arms: dict[str, Callable[[EngineParts], dict[str, float]]] = {
        "in_process": _in_process,
        "over_grpc": lambda parts: _over_grpc(parts, BlockClient),
        "one_ms_added": lambda parts: _over_grpc(parts, _SlowLink),
    }
    _in_process(parts)  # warm-up
    runs = [{name: arm(parts) for name, arm in arms.items()} for _ in track(range(REPETITIONS), "Engine")]
    rows = [
        row("kv_engine", f"{name}_tokens_per_second", round(median(run[name]["rate"] for run in runs), 2), "tokens/s")
        for name in arms
    ]
    for name, peer in (("over_grpc", "in_process"), ("one_ms_added", "over_grpc")):
        ratios = [run[name]["rate"] / run[peer]["rate"] for run in runs]
        lower, middle, upper = quantiles(ratios, n=4)
        rows.append(row("kv_engine", f"{name}_upper_quartile_ratio", round(upper, 3), "ratio", peer))
        rows.append(row("kv_engine", f"{name}_median_ratio", round(middle, 3), "ratio", peer))
        rows.append(row("kv_engine", f"{name}_lower_quartile_ratio", round(lower, 3), "ratio", peer))
    left_out = [run["over_grpc"]["left_out_share"] for run in runs]
    rows.append(row("kv_engine", "left_out_share", round(median(left_out), 4), "share"))
    publish("kv_engine", rows, REPETITIONS, runs=runs)


def _in_process(parts: EngineParts) -> dict[str, float]:
    return _run(parts, InProcessBlocks(parts.scheduler.capacity), lambda: None)


def _over_grpc(parts: EngineParts, link_type: type[BlockClient]) -> dict[str, float]:
    service = RunningService("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "0")
    loop, news = LoopThread(), threading.Event()
    capacity = parts.scheduler.capacity
    spec = PoolSpec("engine", 1, parts.loaded.fingerprint, capacity.block_size, capacity.device_blocks)
    link, task = loop.run(_begin(link_type, service.address, spec, news.set))
    try:
        while not link.ready:
            link.receive()
            news.wait(0.01)

        def wait() -> None:
            assert news.wait(WAIT_SECONDS), "no answer came"
            news.clear()

        return _run(parts, link, wait)
    finally:
        loop.run(_end(task))
        loop.close()
        service.close()


async def _begin(
    link_type: type[BlockClient], address: str, spec: PoolSpec, wake: Callable[[], None]
) -> tuple[BlockClient, "asyncio.Task[None]"]:
    link = link_type(address, spec, wake)
    return link, asyncio.create_task(link.run())


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _run(parts: EngineParts, blocks: BlockManager, wait: Callable[[], None]) -> dict[str, float]:
    """Generate with a new scheduler and an empty pool; return tokens per second, and the share left out."""
    scheduler = Scheduler(replace(parts.scheduler.capacity), Limits())
    engine = Engine(scheduler, parts.runner, blocks, time.monotonic)
    for number in range(SEQUENCES):
        prompt = tuple(1000 + 37 * number + token for token in range(PROMPT_TOKENS))
        scheduler.requests.submit(Request(f"r{number}", prompt, Sampling(temperature=0.0), Stopping(MAX_TOKENS)))
    begun = time.perf_counter()
    while not scheduler.empty:
        turn = engine.turn()
        assert engine.last_failure is None
        if not turn.progressed:
            wait()
    seconds = time.perf_counter() - begun
    totals = scheduler.totals
    return {
        "rate": totals.generated_tokens / seconds,
        "left_out_share": totals.skipped / (totals.planned + totals.skipped),
    }


if __name__ == "__main__":
    main()
