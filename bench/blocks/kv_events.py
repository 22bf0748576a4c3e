"""What KV events cost: CPU time per token of an engine that publishes them, over that of one that does not.

The demo model in bfloat16 with the KV manager as a process. The arms take turns in each repetition: no events, that
once more, events that a subscriber reads, and events for a subscriber that never reads. The CPU time is that of engine
and KV manager, with the threads of ZeroMQ; subscribers are processes of their own and do not count.

Kernels take nearly all of this time, and their own differs between equal runs by more than events cost. So each arm
also runs with kernels that only wait, and the targets are judged by what that takes, with the kernels' median on top.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

from bench.blocks.kv_engine import Run, Work, over_grpc
from bench.loads.engine_worker import BFLOAT16, demo_parts, terms_of
from bench.loads.http_server import free_address
from bench.loads.kernelless_engine import without_kernels
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from kvmanager import PoolSpec
from services.engine.block_client import BlockClient, SealedBlocks
from services.engine.events.engine_events import EngineEvents
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts

REPETITIONS = 9
BLOCKS = 1024
WORKS = {"prefill": Work(8, 1024, 1), "decode": Work(16, 24, 80)}
PUBLISHING = ("read", "unread")
WAITING = "_without_kernels"
ARMS = ("off", "again", *PUBLISHING)
CODE = (
    *("blocks", "engine", "kvmanager", "protos", "services/engine", "services/kvmanager", "services/wire"),
    *("bench/blocks/kv_events.py", "bench/blocks/kv_engine.py", "bench/loads/workers/event_reader.py"),
    "bench/loads/kernelless_engine.py",
)

Runs = Sequence[dict[str, Run]]  # figures of each arm, for each repetition
Columns = dict[str, list[float]]  # CPU microseconds per token of each repetition, by arm


def main() -> None:
    """Measure, and publish the costs."""
    parts = demo_parts(BLOCKS, **BFLOAT16)
    runs: dict[str, list[dict[str, Run]]] = {f"{name}{kind}": [] for name in WORKS for kind in ("", WAITING)}
    for number in repeated(REPETITIONS, "KV events"):
        for name, work in WORKS.items():
            run = {arm: _run(parts, arm, work) for arm in in_turn(list(ARMS), number)}
            with without_kernels(0.0):
                waiting = {arm: _run(parts, arm, work) for arm in in_turn(list(ARMS), number)}
            if number:
                runs[name].append(run)
                runs[name + WAITING].append(waiting)
    terms = {name: terms_of(parts, name, processes=2) for name in WORKS}
    rows = [one for name in WORKS for one in _rows(name, runs[name], runs[name + WAITING], terms[name])]
    publish("kv_events", rows, REPETITIONS, code=CODE, runs=runs)


def _run(parts: EngineParts, arm: str, work: Work) -> Run:
    address = free_address()
    publishes = arm in PUBLISHING
    link = _publishing(address) if publishes else BlockClient
    with _subscriber(address, arm) if publishes else nullcontext():
        return over_grpc(parts, link, work)


def _publishing(address: str) -> type[BlockClient]:
    """Return a link whose pool has events at an address."""

    class Publishing(BlockClient):
        def __init__(self, manager: str, spec: PoolSpec, wake: Callable[[], None], sealed: SealedBlocks | None) -> None:
            self._events = EngineEvents(EngineSettings(kv_events_listen=address), time.time_ns())
            super().__init__(manager, spec, wake, sealed=sealed, follow=self._events.follow({}))

        async def run(self) -> None:
            await self._events.bind()
            self._events.begin(self.replica.spec)
            beat = asyncio.create_task(self._events.beat(2.0))
            try:
                await super().run()
            finally:
                beat.cancel()
                await self._events.close()

    return Publishing


@contextmanager
def _subscriber(address: str, how: str) -> Iterator[None]:
    command: list[Any] = [sys.executable, "-m", "bench.loads.workers.event_reader", address, how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None, "it is a pipe"
        assert process.stdout.readline(), "the subscriber did not start"
        yield
    finally:
        process.kill()
        process.communicate()


def _rows(name: str, runs: Runs, waiting: Runs, terms: Terms) -> list[Row]:
    whole, outside = _columns(runs), _columns(waiting)
    kernels = median(whole["off"]) - median(outside["off"])
    judged = {arm: [kernels + micros for micros in column] for arm, column in outside.items()}
    micros = [*_micros(name, whole, terms), *_micros(name + WAITING, outside, terms)]
    together = _ratios(f"{name}_{{}}_over_off_with_kernels", whole, terms)
    return [*micros, *together, *_ratios(f"{name}_{{}}_over_off", judged, terms)]


def _micros(name: str, columns: Columns, terms: Terms) -> list[Row]:
    return [
        row("kv_events", f"{name}_{arm}_cpu_us_per_token", round(median(columns[arm]), 2), "us", terms={arm: terms})
        for arm in ("off", *PUBLISHING)
    ]


def _columns(runs: Runs) -> Columns:
    return {arm: [run[arm]["cpu_us_per_computed_token"] for run in runs] for arm in ARMS}


def _ratios(metric: str, columns: Columns, terms: Terms) -> list[Row]:
    null = null_interval(columns["off"], columns["again"])
    rows = []
    for arm in PUBLISHING:
        ratio = median(one / other for one, other in zip(columns[arm], columns["off"], strict=True))
        value, sides = round(ratio, 4), {arm: terms, "off": terms}
        rows.append(row("kv_events", metric.format(arm), value, "ratio", "no events", terms=sides, null=null))
    return rows


if __name__ == "__main__":
    main()
