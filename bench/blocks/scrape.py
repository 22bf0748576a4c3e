"""The cost of scrapes for the KV manager: the time of /metrics, and of block steps during it.

An engine sends block steps of 256 decoding sequences every 5 ms, like a fast GPU. Other pools have 50,000 blocks
together, all held. A separate process scrapes ten times a second, or not at all, in turn.
"""

import asyncio
import http.client
import json
import select
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

import grpc

import kvmanager
from bench.loads.decoding_batch import BLOCK_SIZE, POOL_BLOCKS, SEQUENCES, DecodingBatch, attach, round_trip
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from blocks import Allocate, Fork, Length, Step
from services.runtime import transport
from services.wire.step import step_message
from tests.running_quire import RunningService

REPETITIONS = 5
BLOCKS = 50_000
STEPS = 900
WARM_UP_STEPS = 50
STEP_SECONDS = 0.005
SCRAPE_SECONDS = 0.1
ALLOCATED_AT_ONCE = 100
FORKED = 10  # one in this many sequences shares its blocks with another
MILLI = 1e3
TERMS = Terms(
    processes=2, work=f"a Step of {SEQUENCES} sequences every {STEP_SECONDS * MILLI:g} ms, {BLOCKS:,} blocks held"
)
SIDES = {"scraped": TERMS, "unscraped": TERMS}
CODE = (
    *("blocks", "kvmanager", "protos", "services/kvmanager", "services/wire", "services/runtime"),
    *(
        "bench/blocks/scrape.py",
        "bench/loads/decoding_batch.py",
    ),
)

Run = dict[str, Any]


@dataclass(frozen=True)
class FullPools:
    """Full pools of sequences with equal numbers of blocks."""

    name: str
    pools: int
    sequence_blocks: int
    compat: str = "none"


CASES = (
    FullPools("one_pool", 1, 50),
    FullPools("one_pool_vllms_names_too", 1, 50, "vllm"),
    FullPools("sixteen_pools", 16, 50),
    FullPools("one_pool_of_short_sequences", 1, 4),
)


def main() -> None:
    """Measure, and publish."""
    runs = {case.name: _measure(case) for case in CASES}
    rows = [one for case in CASES for one in _rows(case, runs[case.name])]
    publish("scrape", rows, REPETITIONS, code=CODE, runs=runs)


def _rows(case: FullPools, runs: list[Run]) -> Iterator[Row]:
    # The first scrape after an attach writes the engine's series for the first time, which takes longer.
    later = [milliseconds for run in runs for milliseconds in run["scrapes_ms"][1:]]
    values = {
        "first_scrape_ms": median(run["scrapes_ms"][0] for run in runs),
        "scrape_p50_ms": median(later),
        "scrape_p99_ms": _p99(later),
        "step_p50_us": median(run["beside_p50_us"] for run in runs),
        "step_p99_us": median(run["beside_p99_us"] for run in runs),
    }
    for name, value in values.items():
        metric = f"{case.name}_{name}"
        yield row("scrape", metric, round(value, 3), name.rpartition("_")[2], terms={"scraped": TERMS})
    for key in ("p50", "p99"):
        beside, alone, again = ([run[f"{arm}_{key}_us"] for run in runs] for arm in ("beside", "alone", "again"))
        value = round(median(one / other for one, other in zip(beside, alone, strict=True)), 3)
        metric, null = f"{case.name}_step_{key}_over_unscraped", null_interval(alone, again)
        yield row("scrape", metric, value, "ratio", "without scrapes", terms=SIDES, null=null)


def _measure(case: FullPools) -> list[Run]:
    service = RunningService(
        *("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "0", "--metrics-compat", case.compat)
    )
    try:
        return asyncio.run(_measure_at(case, service))
    finally:
        service.close()


async def _measure_at(case: FullPools, service: RunningService) -> list[Run]:
    async with transport.channel(service.address) as channel:
        calls = [await _filled(channel, case, number) for number in range(case.pools)]
        runs = []
        for number in repeated(REPETITIONS, case.name, warm_up=False):
            call = await attach(channel, kvmanager.PoolSpec(f"engine-{number}", 1, "model", BLOCK_SIZE, POOL_BLOCKS))
            steps = DecodingBatch(SEQUENCES).steps(WARM_UP_STEPS + 3 * STEPS)
            await _trips(call, steps, WARM_UP_STEPS)
            runs.append(await _compared(call, steps, service.metrics_url, number))
            call.cancel()
        assert len(calls) == case.pools
        return runs


async def _filled(channel: grpc.aio.Channel, case: FullPools, number: int) -> Any:
    """Attach an engine, and fill its pool with nearly computed sequences."""
    pool_blocks = BLOCKS // case.pools
    call = await attach(channel, kvmanager.PoolSpec(f"full-{number}", 1, "model", BLOCK_SIZE, pool_blocks))
    tokens = case.sequence_blocks * BLOCK_SIZE - 3
    names = range(1, 1 + pool_blocks // case.sequence_blocks)
    forked = names[::FORKED]
    step = 0
    for start in range(0, len(names), ALLOCATED_AT_ONCE):
        step += 1
        some = names[start : start + ALLOCATED_AT_ONCE]
        allocates = [Allocate(one, one, f"r{one}", b"", [one] * tokens, tokens) for one in some]
        await round_trip(call, step_message(Step(step, allocates=allocates)))
    lengths = [Length(one, tokens) for one in names]
    await round_trip(call, step_message(Step(step + 1, lengths=lengths)))
    forks = [Fork(one, len(names) + one, tokens) for one in forked]
    await round_trip(call, step_message(Step(step + 2, forks=forks)))
    return call


async def _compared(call: Any, steps: Iterator[Step], url: str, number: int) -> Run:
    """Return the scrapes, and the block steps beside them, alone, and alone once more."""
    run: Run = {}
    for arm in in_turn(("alone", "again", "beside"), number):
        if arm == "beside":
            trips, run["scrapes_ms"] = await _beside_scrapes(call, steps, url)
        else:
            trips = await _trips(call, steps)
        run |= {f"{arm}_p50_us": median(trips), f"{arm}_p99_us": _p99(trips)}
    return run


async def _beside_scrapes(call: Any, steps: Iterator[Step], url: str) -> tuple[list[float], list[float]]:
    """Return the microseconds of block steps, and the milliseconds of scrapes meanwhile."""
    command = (sys.executable, "-m", "bench.blocks.scrape", "scrape", url)
    scraper = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert scraper.stdout is not None
    await scraper.stdout.readline()  # it has started
    trips = await _trips(call, steps)
    output, _ = await scraper.communicate(b"\n")
    return trips, [seconds * MILLI for seconds in json.loads(output)]


async def _trips(call: Any, steps: Iterator[Step], count: int = STEPS) -> list[float]:
    """Return the microseconds of each of the next block steps."""
    trips, due = [], time.perf_counter()
    for _ in range(count):
        trips.append(await round_trip(call, step_message(next(steps))))
        due = max(due + STEP_SECONDS, time.perf_counter())
        await asyncio.sleep(due - time.perf_counter())
    return trips


def _p99(values: list[float]) -> float:
    return quantiles(values, n=100)[98]


def _scrape(url: str) -> None:
    """Scrape until a line on standard input, and print the seconds of each scrape."""
    place = urlsplit(url)
    seconds: list[float] = []
    print("begun", flush=True)
    due = time.perf_counter()
    while not select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))[0]:
        begun = time.perf_counter()
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
        connection.request("GET", place.path)
        answer = connection.getresponse()
        assert answer.status == 200
        assert b"quire_kv_slots" in answer.read()
        connection.close()
        seconds.append(time.perf_counter() - begun)
        due = begun + SCRAPE_SECONDS
    print(json.dumps(seconds))


if __name__ == "__main__":
    if sys.argv[1:2] == ["scrape"]:
        _scrape(sys.argv[2])
    else:
        main()
