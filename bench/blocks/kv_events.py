"""What KV events cost: CPU time per token of an engine that publishes them, over that of one that does not.

The demo model in bfloat16 with the KV manager as a process. The arms take turns in each repetition: no events, that
once more, events that a subscriber reads, and events for a subscriber that never reads. The CPU time is that of engine
and KV manager, with the threads of ZeroMQ; subscribers are processes of their own and do not count.
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
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from kvmanager import PoolSpec
from services.engine.block_client import BlockClient, SealedBlocks
from services.engine.events.engine_events import EngineEvents
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts

REPETITIONS = 25
BLOCKS = 1024
WORKS = {"prefill": Work(8, 1024, 1), "decode": Work(16, 24, 80)}
PUBLISHING = ("read", "unread")
CODE = (
    *("blocks", "engine", "kvmanager", "protos", "services/engine", "services/kvmanager", "services/wire"),
    *("bench/blocks/kv_events.py", "bench/blocks/kv_engine.py", "bench/loads/workers/event_reader.py"),
)

Runs = Sequence[dict[str, Run]]  # figures of each arm, for each repetition


def main() -> None:
    """Measure, and publish the costs."""
    parts = demo_parts(BLOCKS, **BFLOAT16)
    runs: dict[str, list[dict[str, Run]]] = {name: [] for name in WORKS}
    arms = ("off", "again", *PUBLISHING)
    for number in repeated(REPETITIONS, "KV events"):
        for name, work in WORKS.items():
            run = {arm: _run(parts, arm, work) for arm in in_turn(list(arms), number)}
            if number:
                runs[name].append(run)
    terms = {name: terms_of(parts, name, processes=2) for name in WORKS}
    rows = [one for name in WORKS for one in _rows(name, runs[name], terms[name])]
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


def _rows(name: str, runs: Runs, terms: Terms) -> list[Row]:
    columns = {arm: [run[arm]["cpu_us_per_computed_token"] for run in runs] for arm in runs[0]}
    null = null_interval(columns["off"], columns["again"])
    rows = []
    for arm in ("off", *PUBLISHING):
        value = round(median(columns[arm]), 2)
        rows.append(row("kv_events", f"{name}_{arm}_cpu_us_per_token", value, "us", terms={arm: terms}))
    for arm in PUBLISHING:
        ratio = median(one / other for one, other in zip(columns[arm], columns["off"], strict=True))
        sides = {arm: terms, "off": terms}
        metric, value = f"{name}_{arm}_over_off", round(ratio, 4)
        rows.append(row("kv_events", metric, value, "ratio", "no events", terms=sides, null=null))
    return rows


if __name__ == "__main__":
    main()
