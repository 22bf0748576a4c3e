"""The cost of block management: the core in process, and the service over gRPC.

A step is one of a decoding batch: every sequence reports its new length, and one in `block_size` of them commits a full
block and gets the next one. vLLM's block management runs the same workload if QUIRE_VLLM_PYTHON names a Python
interpreter with vLLM.
"""

import asyncio
import gc
import hashlib
import random
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles

from rich.progress import track

import kvmanager
from bench.blocks import kv_holds
from bench.loads.decoding_batch import BLOCK_SIZE, MICRO, POOL_BLOCKS, SEQUENCES, DecodingBatch, attach, round_trip
from bench.loads.peer import PEERS, Peer
from bench.report.results import Row, publish, row
from blocks import KEY_BYTES, Allocate, Commit, Extend, Free, FreeReason, Step
from services.runtime import transport
from services.wire.step import step_message, step_of
from tests.in_process import adopted
from tests.running_quire import RunningService

REPETITIONS = 7
FEW_SEQUENCES = 32  # they fit into the smallest of these pools
SIZES = (1_000, 10_000, 100_000, 1_000_000)
STEPS = 320  # 20 blocks for each sequence
PREFILL_BLOCKS = 2_000
PROMPTS = 4  # prefilled and freed one after the other
GROWTHS = 40
WIRE_STEPS = 1_000
SECONDS_BESIDE = 120
LARGE_POOL_BLOCKS = 1_000_000
ENGINES = 16
# A metric, its numerator and denominator, and the number of engines that share the manager.
WIRE_RATIOS = (
    (
        "wire_p99_beside_a_million_block_report_over_other_computing",
        "wire_step_p99_us_beside_a_million_block_report",
        "wire_step_p99_us_beside_as_much_other_computing",
        1,
    ),
    ("wire_p50_of_16_engines_over_16_times_one", "wire_step_p50_us_of_16_engines", "wire_step_p50_us", ENGINES),
    (
        "wire_p50_of_the_slowest_of_16_engines_over_the_median",
        "wire_step_p50_us_of_the_slowest_of_16_engines",
        "wire_step_p50_us_of_16_engines",
        1,
    ),
)
# Operations that vLLM has too, for the same batch in a pool of the same size and free order.
COMPARED = ("decode_us_per_sequence", "prefill_us_per_block", "free_us_per_block")
WORKLOAD = {
    "sequences": SEQUENCES,
    "block_size": BLOCK_SIZE,
    "pool_blocks": POOL_BLOCKS,
    "steps": STEPS,
    "prefill_blocks": PREFILL_BLOCKS,
    "prompts": PROMPTS,
}


def main() -> None:
    """Measure everything, and publish it."""
    rows = []
    runs = []
    with Peer(PEERS / "vllm_blocks.py", "QUIRE_VLLM_PYTHON", WORKLOAD) as vllm:
        for _ in track(range(REPETITIONS), "In process"):
            runs.append(_in_process())
            vllm.measure()
    for metric in runs[0]:
        rows.append(row("kv", metric, round(median(run[metric] for run in runs), 3), "us"))
    rows += vllm.rows("kv", COMPARED, runs)
    sizes = [{size: _decode(size, FEW_SEQUENCES) for size in SIZES} for _ in track(range(REPETITIONS), "Pool sizes")]
    by_size = {size: median(run[size] for run in sizes) for size in SIZES}
    rows += [
        row("kv", "decode_100000_over_1000_blocks", round(by_size[100_000] / by_size[1_000], 3), "ratio"),
        row("kv", "decode_1000000_over_1000_blocks", round(by_size[1_000_000] / by_size[1_000], 3), "ratio"),
    ]
    wire = [_over_grpc() for _ in track(range(REPETITIONS), "Over gRPC")]
    rows += [row("kv", metric, round(median(run[metric] for run in wire), 1), "us") for metric in wire[0]]
    rows += [_wire_ratio(wire, *names) for names in WIRE_RATIOS]
    publish(
        "kv",
        rows,
        REPETITIONS,
        runs=runs,
        vllm_runs=vllm.runs,
        wire=wire,
        decode_us_by_pool_blocks={str(size): [run[size] for run in sizes] for size in SIZES},
    )
    kv_holds.main()


def _wire_ratio(wire: list[dict[str, float]], metric: str, above: str, below: str, share: int) -> Row:
    return row("kv", metric, round(median(run[above] / run[below] / share for run in wire), 3), "ratio")


def _in_process() -> dict[str, float]:
    return {
        "decode_us_per_sequence": _decode(POOL_BLOCKS),
        **_prefill(),
        "grow_by_one_block_us": _grow(1),
        "grow_by_two_blocks_us": _grow(2),
    }


def _grow(blocks: int) -> float:
    """Return the microseconds in which a sequence commits `blocks` blocks and gets as many.

    Decoding commits one block at a time, which has a fast path in the core; larger commits run in slices.
    """
    manager, session = _attached(POOL_BLOCKS)
    tokens = array("i", range(blocks * BLOCK_SIZE))
    numbers = range(1, SEQUENCES + 1)
    begin = [Allocate(number, number, "r", bytes((number % 256,)), tokens, len(tokens)) for number in numbers]
    _apply(manager, session, Step(1, allocates=begin))
    seconds = 0.0
    for step in range(GROWTHS):
        commits = [Commit(number, step * blocks, tokens) for number in numbers]
        room = (step + 2) * blocks * BLOCK_SIZE
        extends = [Extend(number, [(number, room)]) for number in numbers]
        seconds += _timed(partial(_apply, manager, session, Step(2 + step, commits=commits, extends=extends)))
    return seconds / GROWTHS / SEQUENCES * MICRO


def _decode(pool_blocks: int, sequences: int = SEQUENCES) -> float:
    """Return microseconds per sequence and step, with ledger and totals, in a pool with a random free order."""
    load = DecodingBatch(sequences)
    manager, session = _attached(pool_blocks)
    # Each Step is read just before it is applied, and its result dropped just after, as in the service.
    messages = (step_message(step).step for step in load.steps(STEPS))
    seconds = [_timed(partial(_apply, manager, session, step_of(message))) for message in messages]
    return sum(seconds[2:]) / STEPS / load.sequences * MICRO  # without the prompts and the commit of all their blocks


def _apply(manager: kvmanager.KVManager, session: kvmanager.Session, step: Step) -> None:
    assert not manager.apply(session, step).result.refusals
    manager.ledger.flush()  # as the service does after each answer


def _attached(pool_blocks: int) -> tuple[kvmanager.KVManager, kvmanager.Session]:
    """Attach a pool that allocates blocks in random order, as after long use."""
    order = list(range(1, pool_blocks + 1))
    random.Random(2).shuffle(order)
    spec = kvmanager.PoolSpec("engine", 1, "model", BLOCK_SIZE, pool_blocks)
    manager = kvmanager.KVManager(epoch=1)
    report = kvmanager.PoolReport(device=kvmanager.TierReport(release_order=order))
    session = manager.attach(spec, adopted(spec, report))
    gc.freeze()  # as the service does after adopting a pool
    return manager, session


def _prefill() -> dict[str, float]:
    """Return microseconds per block to allocate and commit an uncached prompt, to free it, and to hash it.

    Several prompts are prefilled and freed one after the other; the first one is a warm-up.
    """
    manager, session = _attached(POOL_BLOCKS)
    seconds = [_prefill_one(manager, session, number) for number in range(1 + PROMPTS)][1:]
    chunk = bytes(KEY_BYTES + 4 * BLOCK_SIZE)
    sha256 = _timed(lambda: [hashlib.sha256(chunk).digest() for _ in range(PREFILL_BLOCKS)])
    blocks_in_all = PROMPTS * PREFILL_BLOCKS
    return {
        "prefill_us_per_block": sum(prefill for prefill, _ in seconds) / blocks_in_all * MICRO,
        "free_us_per_block": sum(free for _, free in seconds) / blocks_in_all * MICRO,
        "sha256_us_per_block": sha256 / PREFILL_BLOCKS * MICRO,
    }


def _prefill_one(manager: kvmanager.KVManager, session: kvmanager.Session, number: int) -> tuple[float, float]:
    draw = random.Random(3 + number)
    prompt = array("i", (draw.randrange(49_000) for _ in range(PREFILL_BLOCKS * BLOCK_SIZE + 1)))
    allocate = Allocate(1, 1, "r", b"", prompt, len(prompt))
    begin = Step(3 * number + 1, allocates=[allocate])
    commit = Step(3 * number + 2, commits=[Commit(1, 0, prompt[:-1])])
    end = Step(3 * number + 3, frees=[Free(1, FreeReason.FINISHED)])
    prefill = sum(_timed(partial(_apply, manager, session, step)) for step in (begin, commit))
    return prefill, _timed(partial(_apply, manager, session, end))


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# Over gRPC, with the service in another process.


def _over_grpc() -> dict[str, float]:
    service = RunningService("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "0")
    try:
        return asyncio.run(_measure_wire(service.address))
    finally:
        service.close()


async def _measure_wire(address: str) -> dict[str, float]:
    alone = await _round_trips(address, "alone")
    beside, attach_seconds = await _beside_a_large_report(address)
    beside_others = await _beside(address, "beside-others", "compute", str(attach_seconds))
    trips = await asyncio.gather(*(_round_trips(address, f"engine-{number}", 200) for number in range(ENGINES)))
    together = [_percentile(one, 50) for one in trips]
    return {
        "wire_step_p50_us": _percentile(alone, 50),
        "wire_step_p99_us": _percentile(alone, 99),
        "wire_step_p99_us_beside_a_million_block_report": _percentile(beside, 99),
        "wire_step_p99_us_beside_as_much_other_computing": _percentile(beside_others[0], 99),
        "million_block_attach_us": attach_seconds * MICRO,
        "wire_step_p50_us_of_16_engines": median(together),
        "wire_step_p50_us_of_the_slowest_of_16_engines": max(together),
    }


async def _round_trips(address: str, engine_id: str, count: int = WIRE_STEPS) -> list[float]:
    """Attach an engine, run its decoding Steps one after the other, and return the microseconds of each."""
    load = DecodingBatch(SEQUENCES)
    messages = [step_message(step) for step in load.steps(count)]
    async with transport.channel(address) as channel:
        call = await attach(channel, kvmanager.PoolSpec(engine_id, 1, "model", BLOCK_SIZE, POOL_BLOCKS))
        return [await round_trip(call, message) for message in messages][2:]


async def _beside_a_large_report(address: str) -> tuple[list[float], float]:
    """Return one engine's round trips during another's attach with a million blocks, and the attach's seconds."""
    trips, output = await _beside(address, "beside", "attach", address)
    return trips, float(output)


async def _beside(address: str, engine_id: str, *command: str) -> tuple[list[float], bytes]:
    """Return one engine's round trips while a process of this module runs, and that process's output."""
    other = await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.blocks.kv", *command, stdout=-1)
    load = DecodingBatch(SEQUENCES)
    trips = []
    async with asyncio.timeout(SECONDS_BESIDE), transport.channel(address) as channel:
        call = await attach(channel, kvmanager.PoolSpec(engine_id, 1, "model", BLOCK_SIZE, POOL_BLOCKS))
        for step in load.endless_steps():
            if other.returncode is not None:
                break
            trips.append(await round_trip(call, step_message(step)))
            await asyncio.sleep(0)
    assert other.stdout is not None
    return trips[2:], await other.stdout.read()


def _compute(seconds: float) -> None:
    """Keep a core busy, as a baseline: delays beyond this come from the KV manager's work on a large report."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        hashlib.sha256(bytes(1_000_000)).digest()


async def _attach_a_large_pool(address: str) -> None:
    """Attach with a report of a million blocks, half of them cached, and print the seconds."""
    blocks = range(1, LARGE_POOL_BLOCKS + 1)
    keyed = {block: hashlib.sha256(str(block).encode()).digest() for block in blocks[::2]}
    order = [*blocks[1::2], *blocks[::2]]
    report = kvmanager.PoolReport(device=kvmanager.TierReport(keyed=keyed, release_order=order), last_step=1)
    async with transport.channel(address) as channel:
        begun = time.perf_counter()
        await attach(channel, kvmanager.PoolSpec("large", 1, "model", BLOCK_SIZE, LARGE_POOL_BLOCKS), report)
        sys.stdout.write(f"{time.perf_counter() - begun}")


def _percentile(values: list[float], percent: int) -> float:
    return quantiles(values, n=100)[percent - 1]


if __name__ == "__main__":
    if sys.argv[1:2] == ["attach"]:
        asyncio.run(_attach_a_large_pool(sys.argv[2]))
    elif sys.argv[1:2] == ["compute"]:
        _compute(float(sys.argv[2]))
    else:
        main()
