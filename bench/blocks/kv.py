"""The cost of block management: the core in process, and the service over gRPC.

A step is one of a decoding batch: every sequence reports its new length, and one in `block_size` of them commits a full
block and gets the next one. vLLM's block management runs the same workload if QUIRE_VLLM_PYTHON names a Python
interpreter with vLLM. Over gRPC, block steps are also offered at random times at a fixed rate below the capacity: by
one engine, by the same one while another attaches with a million blocks, and by 16 engines.
"""

import asyncio
import gc
import hashlib
import random
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, takewhile
from statistics import median, quantiles

import kvmanager
from bench.blocks import kv_holds
from bench.loads.decoding_batch import (
    BLOCK_SIZE,
    MICRO,
    POOL_BLOCKS,
    SEQUENCES,
    DecodingBatch,
    attach_with,
    begun,
    offered,
    round_trip,
)
from bench.loads.peer import PEERS, Figures, Peer
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from blocks import KEY_BYTES, Allocate, Commit, Extend, Free, FreeReason, Step
from quire.v1 import kvmanager_pb2 as pb
from services.runtime import transport
from services.wire.report import pages_of
from services.wire.step import step_message, step_of
from tests.in_process import adopted
from tests.running_quire import RunningService

REPETITIONS, WIRE_REPETITIONS = 7, 5
FEW_SEQUENCES = 32  # they fit into the smallest of these pools
SIZES = (1_000, 10_000, 100_000, 1_000_000)
STEPS = 320  # 20 blocks for each sequence
PREFILL_BLOCKS = 2_000
PROMPTS = 4  # prefilled and freed one after the other
GROWTHS = 40
WIRE_STEPS = 1_600
MOST_STEPS = 4_000  # while another engine attaches
STEPS_A_SECOND = 400.0  # about a quarter of what the manager can do
SECONDS_BESIDE = 120
LARGE_POOL_BLOCKS = 1_000_000
ENGINES = 16
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
WORK = f"{SEQUENCES} sequences, {POOL_BLOCKS:,} blocks in random order"
IN_PROCESS = Terms(work=WORK)
POOLS = Terms(work=f"{FEW_SEQUENCES} sequences, blocks in random order")
BACK_TO_BACK = Terms(processes=2, work=f"Steps of {SEQUENCES} sequences, one after the other")
PACED = Terms(processes=2, work=f"{STEPS_A_SECOND:g} Steps of {SEQUENCES} sequences a second")
AGAIN = "again"
CODE = (
    *("blocks", "kvmanager", "protos", "services/kvmanager", "services/wire", "services/runtime"),
    *(
        "bench/blocks/kv.py",
        "bench/loads/decoding_batch.py",
        "bench/peers/vllm_blocks.py",
    ),
)

Runs = Sequence[Figures]


def main() -> None:
    """Measure everything, and publish it."""
    with Peer(PEERS / "vllm_blocks.py", "QUIRE_VLLM_PYTHON", WORKLOAD) as vllm:
        runs = _beside_vllm(vllm)
        rows = in_process_rows(runs, vllm.name or vllm.missing, vllm.terms(WORK))
    sizes = [_sizes(number) for number in repeated(REPETITIONS, "Pool sizes")][1:]
    wire = [_over_grpc(number) for number in repeated(WIRE_REPETITIONS, "Over gRPC")][1:]
    publish(
        "kv",
        [*rows, *size_rows(sizes), *wire_rows(wire)],
        min(REPETITIONS, WIRE_REPETITIONS),
        code=CODE,
        runs=runs["quire"],
        again_runs=runs[AGAIN],
        vllm_runs=runs.get("vllm", []),
        wire=wire,
        decode_us_by_pool_blocks={str(size): [run[str(size)] for run in sizes] for size in SIZES},
    )
    kv_holds.main()


def _beside_vllm(vllm: Peer) -> dict[str, list[Figures]]:
    """Return the figures of the core, twice in each repetition, and of vLLM, which take turns."""
    arms: dict[str, Callable[[], Figures | None]] = {"quire": _in_process, AGAIN: _in_process, "vllm": vllm.measure}
    runs: dict[str, list[Figures]] = {}
    for number in repeated(REPETITIONS, "In process"):
        for name in in_turn(list(arms), number):
            figures = arms[name]()
            if number and figures:
                runs.setdefault(name, []).append(figures)
    return runs


def in_process_rows(runs: dict[str, list[Figures]], peer: str, theirs: dict[str, Terms]) -> list[Row]:
    """Return the figures of the core, and those that vLLM has too with their ratios."""
    ours, sides = runs["quire"], {"quire": IN_PROCESS}
    rows = [
        row("kv", metric, round(_median(ours, metric) or 0.0, 3), "us", terms=sides, null=_null(runs, metric))
        for metric in ours[0]
    ]
    for metric in COMPARED:
        of_vllm = runs.get("vllm", [])
        ratios = [own[metric] / other[metric] for own, other in zip(ours, of_vllm, strict=bool(of_vllm))]
        value = round(median(ratios), 3) if ratios else None
        rows.append(row("kv", f"vllm_{metric}", _median(of_vllm, metric), "us", peer, terms=theirs))
        both = sides | theirs
        rows.append(row("kv", f"{metric}_over_vllm", value, "ratio", peer, terms=both, null=_null(runs, metric)))
    return rows


def _null(runs: dict[str, list[Figures]], metric: str) -> tuple[float, float]:
    return null_interval(*([run[metric] for run in runs[name]] for name in ("quire", AGAIN)))


def _median(runs: Runs, metric: str) -> float | None:
    return round(median(run[metric] for run in runs), 3) if runs else None


def _sizes(number: int) -> dict[str, float]:
    """Return microseconds per sequence and step in pools of each size, twice in the smallest."""
    arms = {str(size): size for size in SIZES} | {AGAIN: SIZES[0]}
    return {name: _decode(arms[name], FEW_SEQUENCES) for name in in_turn(list(arms), number)}


def size_rows(sizes: Runs) -> list[Row]:
    """Return how much slower decoding is in larger pools."""
    null = null_interval([run[str(SIZES[0])] for run in sizes], [run[AGAIN] for run in sizes])
    rows = []
    for size in SIZES[-2:]:
        ratio = median(run[str(size)] / run[str(SIZES[0])] for run in sizes)
        name = f"decode_{size}_over_{SIZES[0]}_blocks"
        rows.append(row("kv", name, round(ratio, 3), "ratio", terms={"quire": POOLS}, null=null))
    return rows


def wire_rows(wire: Runs) -> list[Row]:
    """Return the times of block steps over gRPC, and what other engines change in them."""
    shown = {
        "wire_step_p50_us": ("back_to_back_p50_us", BACK_TO_BACK),
        "wire_step_p99_us": ("back_to_back_p99_us", BACK_TO_BACK),
        "wire_paced_step_p50_us": ("one_p50_us", PACED),
        "wire_paced_step_p99_us": ("one_p99_us", PACED),
        "wire_paced_step_p99_us_beside_a_million_block_report": ("beside_p99_us", PACED),
        "million_block_attach_us": ("beside_attach_us", PACED),
        "wire_paced_step_p50_us_of_16_engines": ("sixteen_p50_us", PACED),
        "wire_paced_step_p99_us_of_16_engines": ("sixteen_p99_us", PACED),
    }
    rows = [
        row("kv", name, round(median(run[of] for run in wire), 1), "us", terms={"quire": terms})
        for name, (of, terms) in shown.items()
    ]
    slowest = median(run["sixteen_slowest_over_median"] for run in wire)
    name = "wire_p50_of_the_slowest_of_16_engines_over_the_median"
    return [
        *rows,
        _over_one(wire, "wire_p99_beside_a_million_block_report_over_alone", "beside", "p99_us"),
        _over_one(wire, "wire_p50_of_16_engines_over_one_at_the_same_rate", "sixteen", "p50_us"),
        _over_one(wire, "wire_p99_of_16_engines_over_one_at_the_same_rate", "sixteen", "p99_us"),
        row("kv", name, round(slowest, 3), "ratio", terms={"quire": PACED}),
    ]


def _over_one(wire: Runs, metric: str, arm: str, of: str) -> Row:
    """Return the ratio over one engine alone, with the same block steps at the same times."""
    one, again = ([run[f"{name}_{of}"] for run in wire] for name in ("one", AGAIN))
    ratio = median(run[f"{arm}_{of}"] / alone for run, alone in zip(wire, one, strict=True))
    sides = {arm: PACED, "one": PACED}
    return row("kv", metric, round(ratio, 3), "ratio", "one engine", terms=sides, null=null_interval(one, again))


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
    # Each block step is read just before it is applied, and its result dropped just after, as in the service.
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


def _over_grpc(number: int) -> dict[str, float]:
    """Start a KV manager, and return the figures of repetition `number`."""
    service = RunningService("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "0")
    try:
        return asyncio.run(_measure_wire(service.address, number))
    finally:
        service.close()


async def _measure_wire(address: str, number: int) -> dict[str, float]:
    arms: dict[str, Callable[[], Awaitable[dict[str, float]]]] = {
        "back_to_back": lambda: _back_to_back(address),
        "one": lambda: _paced(address, "one", 1),
        "again": lambda: _paced(address, "again", 1),
        "sixteen": lambda: _paced(address, "sixteen", ENGINES),
        "beside": lambda: _beside_a_large_report(address),
    }
    figures: dict[str, float] = {}
    for name in in_turn(list(arms), number):
        figures |= {f"{name}_{metric}": value for metric, value in (await arms[name]()).items()}
    return figures


@cache
def _messages() -> list[pb.PoolRequest]:
    """Return the block steps of a batch: two that begin it, and those that are timed. Engines share them."""
    return [step_message(step) for step in DecodingBatch(SEQUENCES).steps(MOST_STEPS)]


@cache
def _due() -> list[float]:
    """Return the seconds at which block steps are due: a Poisson process, the same for any number of engines."""
    draw = random.Random(5)
    return list(accumulate(draw.expovariate(STEPS_A_SECOND) for _ in range(MOST_STEPS)))


async def _back_to_back(address: str) -> dict[str, float]:
    """Run an engine's decoding block steps one after the other."""
    async with transport.channel(address) as channel:
        call = await begun(channel, "alone", POOL_BLOCKS, _messages())
        return _percentiles([await round_trip(call, message) for message in _messages()[2:WIRE_STEPS]])


async def _paced(address: str, name: str, engines: int) -> dict[str, float]:
    """Offer the same block steps at the same times, by one engine or by several in turn."""
    async with transport.channel(address) as channel:
        calls = [await begun(channel, f"{name}-{number}", POOL_BLOCKS, _messages()) for number in range(engines)]
        begin = time.perf_counter()
        due = [begin + seconds for seconds in _due()[:WIRE_STEPS]]
        shares = [due[number::engines] for number in range(engines)]
        trips = await asyncio.gather(
            *(offered(call, _messages()[2:], times) for call, times in zip(calls, shares, strict=True))
        )
    medians = [median(one) for one in trips]
    return _percentiles([trip for one in trips for trip in one]) | {
        "slowest_over_median": max(medians) / median(medians)
    }


async def _beside_a_large_report(address: str) -> dict[str, float]:
    """Offer one engine's block steps, as alone, while another attaches with a million blocks.

    The other process has its report ready before, so that it computes little while block steps are timed.
    """
    command = (sys.executable, "-m", "bench.blocks.kv", "attach", address)
    other = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1)
    assert other.stdin is not None
    assert other.stdout is not None
    async with asyncio.timeout(SECONDS_BESIDE), transport.channel(address) as channel:
        await other.stdout.readline()  # it is ready
        call = await begun(channel, "beside", POOL_BLOCKS, _messages())
        other.stdin.write(b"go\n")
        attached = asyncio.create_task(other.stdout.read())
        begin = time.perf_counter()
        due = (begin + seconds for seconds in _due())
        trips = await offered(call, _messages()[2:], _until(attached, due))
        seconds = float(await attached)
    return _percentiles(trips) | {"attach_us": seconds * MICRO}


def _until(attached: "asyncio.Task[bytes]", due: Iterable[float]) -> Iterator[float]:
    """Yield times until the other engine is attached."""
    return takewhile(lambda _: not attached.done(), due)


async def _attach_a_large_pool(address: str) -> None:
    """Attach with a report of a million blocks, half of them cached, on a line of input, and print the seconds."""
    blocks = range(1, LARGE_POOL_BLOCKS + 1)
    keyed = {block: hashlib.sha256(str(block).encode()).digest() for block in blocks[::2]}
    order = [*blocks[1::2], *blocks[::2]]
    report = kvmanager.PoolReport(device=kvmanager.TierReport(keyed=keyed, release_order=order), last_step=1)
    pages = list(pages_of(report))
    async with transport.channel(address) as channel:
        print("ready", flush=True)
        sys.stdin.readline()
        begun = time.perf_counter()
        spec = kvmanager.PoolSpec("large", 1, "model", BLOCK_SIZE, LARGE_POOL_BLOCKS)
        await attach_with(channel, spec, pages)
        sys.stdout.write(f"{time.perf_counter() - begun}")


def _percentiles(trips: list[float]) -> dict[str, float]:
    return {"p50_us": median(trips), "p99_us": quantiles(trips, n=100)[98]}


if __name__ == "__main__":
    if sys.argv[1:2] == ["attach"]:
        asyncio.run(_attach_a_large_pool(sys.argv[2]))
    else:
        main()
