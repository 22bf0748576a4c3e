"""The cost of scrapes for the KV manager: the time of /metrics, and of Steps during it.

An engine sends Steps of 256 decoding sequences every 5 ms, like a fast GPU. Other pools have 50,000 blocks together,
all held. A separate process scrapes ten times a second, or not at all.
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
from rich.progress import track

import kvmanager
from bench.loads.decoding_batch import BLOCK_SIZE, POOL_BLOCKS, SEQUENCES, DecodingBatch, attach, round_trip
from bench.report.results import Row, publish, row
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
    runs = {case.name: _measure(case) for case in track(CASES, "Scrapes")}
    rows = [one for case in CASES for one in _rows(case, runs[case.name])]
    publish("scrape", rows, REPETITIONS, runs=runs)


def _rows(case: FullPools, runs: list[Run]) -> Iterator[Row]:
    def middle(key: str) -> float:
        return float(round(median(run[key] for run in runs), 3))

    # The first scrape after an attach writes the engine's series for the first time, which takes longer.
    later = [milliseconds for run in runs for milliseconds in run["scrapes_ms"][1:]]
    yield row("scrape", f"{case.name}_first_scrape_ms", round(median(run["scrapes_ms"][0] for run in runs), 3), "ms")
    yield row("scrape", f"{case.name}_scrape_p50_ms", round(median(later), 3), "ms")
    yield row("scrape", f"{case.name}_scrape_p99_ms", round(_p99(later), 3), "ms")
    for metric in ("step_p50_us", "step_p99_us"):
        yield row("scrape", f"{case.name}_{metric}", middle(metric), "us")
    for key in ("step_p50", "step_p99"):
        yield row("scrape", f"{case.name}_{key}_over_unscraped", middle(f"{key}_ratio"), "ratio", "without scrapes")


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
        for number in range(REPETITIONS):
            call = await attach(channel, kvmanager.PoolSpec(f"engine-{number}", 1, "model", BLOCK_SIZE, POOL_BLOCKS))
            steps = DecodingBatch(SEQUENCES).steps(WARM_UP_STEPS + 2 * STEPS)
            await _trips(call, steps, WARM_UP_STEPS)
            runs.append(await _compared(call, steps, service.metrics_url))
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


async def _compared(call: Any, steps: Iterator[Step], url: str) -> Run:
    alone = await _trips(call, steps)
    scraper = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.blocks.scrape",
        "scrape",
        url,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert scraper.stdout is not None
    await scraper.stdout.readline()  # it has started
    beside = await _trips(call, steps)
    output, _ = await scraper.communicate(b"\n")
    return {
        "scrapes_ms": [seconds * MILLI for seconds in json.loads(output)],
        "step_p50_us": median(beside),
        "step_p99_us": _p99(beside),
        "step_p50_us_unscraped": median(alone),
        "step_p99_us_unscraped": _p99(alone),
        "step_p50_ratio": median(beside) / median(alone),
        "step_p99_ratio": _p99(beside) / _p99(alone),
    }


async def _trips(call: Any, steps: Iterator[Step], count: int = STEPS) -> list[float]:
    """Return the microseconds of each of the next Steps."""
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
