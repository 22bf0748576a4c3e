"""The longest time for which the KV manager's core blocks its thread, at a million blocks: slices of verbs and calls.

The core is called as by the service, which handles other requests after every slice. Times are CPU times of the thread,
including Python's garbage collector but no other processes.
"""

import gc
import hashlib
import random
import time
from array import array
from collections.abc import Callable, Generator, Iterable
from statistics import median
from typing import Any, TypeVar

import kvmanager
from bench.report.results import publish, repeated, row
from bench.report.terms import Terms
from blocks import Allocate, Commit, Extend, Fork, Free, FreeReason, Pin, Reset, Step, Unpin
from services.kvmanager.garbage_collection import collect_all, freeze_survivors, freezing

BLOCKS, HOST_BLOCKS, BLOCK_SIZE = 1_000_000, 125_000, 16
LONG_BLOCKS = 62_500  # of a sequence of a million tokens
SEQUENCES, SEQUENCE_BLOCKS = 990, 1_000
GROUP = 16_000  # sequences, nearly as many as there may be
EQUAL_BLOCKS = 300_000  # with one key
WORK = 1_000  # units of work in a slice of a block step, as in the service
MILLI = 1e3
REPETITIONS = 5
CODE = ("blocks", "kvmanager", "services/kvmanager", "bench/blocks/kv_holds.py")
TERMS = {"quire": Terms(work=f"{BLOCKS:,} blocks", start="cold")}

_Result = TypeVar("_Result")


class _Holds:
    """The longest hold of each name so far, in milliseconds."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    def sliced(self, name: str, work: Generator[Any, None, _Result]) -> _Result:
        """Do work in slices, each of which is a hold."""
        while True:
            begun = time.thread_time()
            try:
                next(work)
            except StopIteration as end:
                result: _Result = end.value
                return result
            finally:
                held = (time.thread_time() - begun) * MILLI
                self.longest[name] = max(self.longest.get(name, 0.0), held)


class _Engine:
    """An engine's block steps, applied in slices."""

    def __init__(self, holds: _Holds) -> None:
        self.holds = holds
        self.manager = kvmanager.KVManager(epoch=1)
        spec = kvmanager.PoolSpec("engine", 1, "model", BLOCK_SIZE, BLOCKS, HOST_BLOCKS)
        pool = holds.sliced("adopt_empty", freezing(kvmanager.adopt(spec, kvmanager.PoolReport())))
        self.session = self.manager.attach(spec, pool)
        gc.freeze()  # as the service does after adopting a pool
        self._step = 0

    def do(self, verb: str, **items: Any) -> None:
        self._step += 1
        step = Step(self._step, **items)
        applied = self.holds.sliced(verb, self.manager.applying(self.session, step, WORK))
        assert not applied.result.refusals, applied.result.refusals
        self.holds.sliced("settle", _once(self.manager.ledger.flush))

    def begin(self, sequence: int, blocks: int, kind: str) -> None:
        """Allocate and commit a prompt; the same one for the same sequence."""
        prompt = array("i", random.Random(sequence).choices(range(49_000), k=blocks * BLOCK_SIZE + 1))
        request = Allocate(sequence, sequence, f"request-{sequence}", b"", prompt, len(prompt))
        self.do(f"allocate_{kind}", allocates=[request])
        committed = self.session.pool.sequences[sequence].committed_blocks
        if committed < blocks:
            self.do(f"commit_{kind}", commits=[Commit(sequence, 0, prompt[:-1])])

    def end(self, sequences: Iterable[int], kind: str) -> None:
        self.do(f"free_{kind}", frees=[Free(sequence, FreeReason.FINISHED) for sequence in sequences])


def _once(work: Callable[[], _Result]) -> Generator[None, None, _Result]:
    return work()
    yield


def main() -> None:
    """Measure, and publish the longest hold and those of each verb and call."""
    with freeze_survivors():  # as the service does
        runs = [longest_holds() for _ in repeated(REPETITIONS, "Holds", warm_up=False)]
    by_verb = {verb: median(run[verb] for run in runs) for verb in sorted(runs[0])}
    rows = [row("kv_holds", "longest_hold_ms", round(max(by_verb.values()), 2), "ms", terms=TERMS)]
    rows += [row("kv_holds", f"{verb}_ms", round(held, 2), "ms", terms=TERMS) for verb, held in by_verb.items()]
    publish("kv_holds", rows, REPETITIONS, code=CODE, runs=runs)


def longest_holds() -> dict[str, float]:
    """Return the longest hold of each verb and call, in milliseconds."""
    holds = _Holds()
    engine = _Engine(holds)
    _a_long_sequence(engine)
    _a_full_pool(engine)
    _looks(engine)
    _ends(engine)
    _a_full_report(holds)
    _a_large_group(_Engine(holds))
    _equal_blocks(_Engine(holds))
    return holds.longest


def _a_long_sequence(engine: _Engine) -> None:
    tokens = LONG_BLOCKS * BLOCK_SIZE
    engine.begin(1, LONG_BLOCKS, "long")
    engine.do("pin", pins=[Pin("pin", 1, LONG_BLOCKS)])
    engine.do("fork", forks=[Fork(1, 2, tokens)])
    engine.do("extend", extends=[Extend(1, [(1, 2 * tokens), (2, 2 * tokens)])])
    engine.end((2, 1), "long")
    engine.begin(1, LONG_BLOCKS, "long_hit")
    engine.do("unpin", pins=[Unpin("pin")])
    engine.do("swap_out", swap_outs=[1])
    engine.do("swap_in", swap_ins=[1])
    engine.end((1,), "long")


def _a_full_pool(engine: _Engine) -> None:
    for sequence in range(10, 10 + SEQUENCES):
        engine.begin(sequence, SEQUENCE_BLOCKS, "many")
    engine.do("pin", pins=[Pin("pin", 10, SEQUENCE_BLOCKS)])


def _looks(engine: _Engine) -> None:
    holds, pool = engine.holds, engine.session.pool
    holds.sliced("count_slots", pool.count_slots())
    holds.sliced("list_sequences", pool.listing_sequences(0, 1_000))
    drawn = holds.sliced("draw", _once(lambda: engine.manager.open_map(engine.session)))
    holds.sliced("block_map", drawn.building())
    engine.manager.close_map(engine.session, drawn)
    holds.sliced("audit", engine.manager.audit(engine.session))
    prompt = array("i", random.Random(10).choices(range(49_000), k=SEQUENCE_BLOCKS * BLOCK_SIZE + 1))
    holds.sliced("lookup", engine.manager.lookup(prompt))
    holds.sliced("look_through_hourly", _once(collect_all))


def _ends(engine: _Engine) -> None:
    holds, pool = engine.holds, engine.session.pool
    engine.end(range(20, 920), "many")
    engine.begin(5, LONG_BLOCKS, "evicting")
    cached = pool.device.eviction_order()[LONG_BLOCKS]
    holds.sliced("withhold", _once(lambda: pool.withhold([cached], [])))
    engine.do("reset", pins=[Reset()])
    free = pool.device.eviction_order()[-1]
    holds.sliced("withhold", _once(lambda: pool.withhold([free], [])))
    engine.manager.detach(engine.session)
    holds.sliced("dismantle", pool.dismantle())


def _a_full_report(holds: _Holds) -> None:
    """Adopt a report of a million blocks, half of them cached."""
    blocks = range(1, BLOCKS + 1)
    keyed = {block: hashlib.sha256(str(block).encode()).digest() for block in blocks[::2]}
    order = [*blocks[1::2], *blocks[::2]]
    report = kvmanager.PoolReport(device=kvmanager.TierReport(keyed=keyed, release_order=order), last_step=1)
    gc.freeze()
    spec = kvmanager.PoolSpec("engine", 1, "model", BLOCK_SIZE, BLOCKS)
    pool = holds.sliced("adopt_full", freezing(kvmanager.adopt(spec, report)))
    holds.sliced("report_full", kvmanager.reporting(pool))
    holds.sliced("dismantle", pool.dismantle())


def _a_large_group(engine: _Engine) -> None:
    """Fork a group of thousands of sequences with falling ids, swap it, and free it from its end."""
    engine.begin(20_000, 1, "small")
    children = range(19_999, 20_000 - GROUP, -1)
    engine.do("fork_group", forks=[Fork(20_000, child, BLOCK_SIZE) for child in children])
    engine.do("swap_out_group", swap_outs=[20_000])
    engine.do("swap_in_group", swap_ins=[20_000])
    engine.end((20_000, *children), "group")


def _equal_blocks(engine: _Engine) -> None:
    """Commit one prompt thousands of times: its last block is computed again each time, under the same key."""
    prompt = array("i", range(BLOCK_SIZE))
    for first in range(1, EQUAL_BLOCKS, GROUP):
        numbers = range(first, first + GROUP)
        engine.do("allocate_equal", allocates=[Allocate(one, one, "r", b"", prompt, BLOCK_SIZE) for one in numbers])
        engine.do("commit_equal", commits=[Commit(one, 0, prompt) for one in numbers])
        engine.end(numbers, "equal")


if __name__ == "__main__":
    main()
