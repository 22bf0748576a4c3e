"""A random model of Llama-3-8B's shape, end to end: wall, device and host time of its decoding steps, and prompts."""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.cases import BLOCK_SIZE
from bench.gpu_check.llama_engine import LLAMA_3_8B, TINY, TimedRunner, decoders, random_model, runner_of
from bench.gpu_check.notes import Notes
from bench.gpu_check.parts import ceilings
from bench.gpu_check.pools.engine import Pools, pools
from bench.gpu_check.profiles import Occupancy, profiled
from blocks import blocks_for
from engine.model.loaded import LoadedModel
from engine.run.loop import Engine
from engine.schedule.request import Request, Sampling, Stopping


@dataclass(frozen=True)
class LlamaSizes:
    """The model and its load: batches of requests at a context length, and some long prompts.

    `steps` are timed; the `profiled` ones come after them.
    """

    config: dict[str, Any]
    batches: tuple[int, ...]
    context: int
    steps: int
    profiled: int
    prompt: int
    prompts: int
    token_budget: int
    ceilings: ceilings.CeilingSizes

    @property
    def decoded(self) -> int:
        """Steps in which all requests of a batch decode."""
        return self.steps + self.profiled

    @property
    def blocks(self) -> int:
        """Blocks of the largest batch, and of two prompts, one of them cached."""
        lengths = self.context + 2 * self.decoded + max(self.batches)
        return max(max(self.batches) * (blocks_for(lengths, BLOCK_SIZE) + 2), 2 * blocks_for(self.prompt, BLOCK_SIZE))


FULL = LlamaSizes(LLAMA_3_8B, (1, 32, 256), 1024, 48, 16, 8000, 3, 8192, ceilings.FULL)
SMALL = LlamaSizes(TINY, (1, 2), 12, 2, 1, 20, 1, 64, ceilings.SMALL)

Wait = Callable[[bool], None]

# Ways of sampling by the part of their rows' names.
_SAMPLINGS = {"": Sampling(temperature=0.0), "_top_p": Sampling(temperature=1.0, top_p=0.9)}


class Steps(NamedTuple):
    """Seconds of each step, and seconds of each in which the host computed; then, of profiled steps, wall and use.

    There is no use where the profiler cannot record, as in a container without the permission.
    """

    wall: list[float]
    host: list[float]
    profiled: list[float]
    occupancy: Occupancy | None

    @property
    def device(self) -> float | None:
        """Seconds of a step in which the device computed."""
        return median(self.profiled) * (1 - self.occupancy.idle_share) if self.occupancy else None


def measure(sizes: LlamaSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Decode at each batch size, then begin with a long prompt."""
    loaded = random_model(sizes.config, device)
    found: dict[str, float] = {}
    with notes.kept("llama, ceilings"):
        found = ceilings.device_ceilings(sizes.ceilings, device)
        notes.raw("llama_ceilings", found)
    made = decoders(loaded, sizes.blocks, sizes.batches, device)
    runner = TimedRunner(runner_of(loaded, made, max(sizes.batches)), device)
    served = _Served(pools(notes), runner, loaded, sizes)
    for batch in sizes.batches:
        if deadline.passed():
            return
        with notes.kept(f"llama, {batch} sequences"):
            _batch(batch, served, found, notes)
    if not deadline.passed():
        with notes.kept("llama, a long prompt"):
            spent = [_prefill(served, seed) for seed in range(sizes.prompts)]
            notes.raw("prompt_seconds", spent)
            notes.row("llama_3_8b_prefill", round(sizes.prompt / median(spent)), "tokens/s")


class _Served(NamedTuple):
    """A model with what its engines are made of."""

    pools: Pools
    runner: TimedRunner
    loaded: LoadedModel
    sizes: LlamaSizes

    def engine(self) -> AbstractContextManager[tuple[Engine, Wait]]:
        """Return an engine with an empty pool."""
        sizes = self.sizes
        return self.pools.engine(self.runner, self.loaded, sizes.blocks, sizes.token_budget, max(sizes.batches))


def _batch(batch: int, served: _Served, found: dict[str, float], notes: Notes) -> None:
    """Decode the same prompts with each way of sampling; later ones find the prompts in the cache."""
    sizes, loaded = served.sizes, served.loaded
    bound = roofline(loaded, batch, sizes.context, found) if found else None
    prompts = _prompts(batch, sizes.context - sizes.decoded // 2, loaded.vocabulary_size)
    with served.engine() as (engine, wait):
        for suffix, sampling in _SAMPLINGS.items():
            name = f"llama_3_8b_b{batch}{suffix}"
            with notes.kept(name):
                steps = _decode(engine, wait, served.runner, prompts, sampling, sizes, notes)
                notes.raw(name, steps._asdict())
                _note(notes, name, batch, steps, bound, served.pools.peer)
                if batch == min(sizes.batches) and not suffix:  # short steps leave the host the least time to prepare
                    share = steps.occupancy and round(steps.occupancy.idle_share_between_steps, 4)
                    notes.row("idle_share_between_steps", share, "share")


def _note(notes: Notes, name: str, batch: int, steps: Steps, bound: float | None, manager: str | None) -> None:
    step, device, use = median(steps.wall), steps.device, steps.occupancy
    notes.row(f"{name}_milliseconds_per_step", round(1000 * step, 3), "ms")
    notes.row(f"{name}_device_milliseconds_per_step", device and round(1000 * device, 3), "ms")
    notes.row(f"{name}_host_milliseconds_per_step", round(1000 * median(steps.host), 3), "ms", manager)
    notes.row(f"{name}_tokens_per_second", round(batch / step, 1), "1/s")
    notes.row(f"{name}_of_the_roofline", bound and round(bound / step, 3), "ratio", "memory and products")
    notes.row(f"{name}_idle_share", use and round(use.idle_share, 4), "share")


def roofline(loaded: LoadedModel, batch: int, context: int, found: dict[str, float]) -> float:
    """Return the lower bound of a step's seconds: read all matrices once or multiply them, then read all K and V.

    `found` has bytes read and operations of products, per second.
    """
    embedding = loaded.model.get_input_embeddings().weight
    matrices = sum(one.numel() for one in loaded.model.parameters() if one.dim() == 2) - embedding.numel()
    products = max(2 * matrices / found["read"], 2 * batch * matrices / found["products"])
    cached = batch * context * loaded.geometry.block_bytes(1, loaded.dtype) / found["read"]
    return float(products + cached)


def _prompts(batch: int, length: int, vocabulary: int, seed: int = 0) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    return [tuple(draw.randrange(vocabulary) for _ in range(length)) for _ in range(batch)]


def _decode(
    engine: Engine,
    wait: Wait,
    runner: TimedRunner,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    sizes: LlamaSizes,
    notes: Notes,
) -> Steps:
    """Decode a batch, timed and then profiled. The steps are centred on the context length."""
    stopping = Stopping(2 * sizes.decoded + len(prompts))
    for number, prompt in enumerate(prompts):
        engine.scheduler.requests.submit(Request(f"r{number}", prompt, sampling, stopping))
    clock = _StepClock(engine, wait, runner, len(prompts))
    clock.run(1)  # its time may include the end of a prompt
    timed = clock.run(sizes.steps)
    watched: list[tuple[float, float]] = []
    occupancy = None
    with notes.kept(f"profile of {len(prompts)} sequences"):
        occupancy = profiled(lambda: watched.extend(clock.run(sizes.profiled)), runner.device)
    for number in range(len(prompts)):
        engine.scheduler.requests.cancel(f"r{number}")
    _finish(engine, wait)
    walls, hosts = [wall for wall, _ in timed], [wall - waited for wall, waited in timed]
    return Steps(walls, hosts, [wall for wall, _ in watched], occupancy)


class _StepClock:
    """Times the steps in which all requests of a batch decode."""

    def __init__(self, engine: Engine, wait: Wait, runner: TimedRunner, batch: int) -> None:
        self._engine = engine
        self._wait = wait
        self._runner = runner
        self._batch = batch

    def run(self, steps: int) -> list[tuple[float, float]]:
        """Return the seconds of each step, and those in which the host waited for the device or the KV manager."""
        found: list[tuple[float, float]] = []
        self._runner.waited, last = 0.0, time.perf_counter()
        while len(found) < steps:
            before, turn = self._engine.scheduler.totals.generated_tokens, self._engine.turn()
            assert self._engine.last_failure is None, self._engine.last_failure
            if turn.step is None:
                self._pause(turn.progressed)
                continue
            now = time.perf_counter()
            if self._engine.scheduler.totals.generated_tokens - before == self._batch:
                found.append((now - last, self._runner.waited))
            self._runner.waited, last = 0.0, now
        return found

    def _pause(self, progressed: bool) -> None:
        begun = time.perf_counter()
        self._wait(progressed)
        self._runner.waited += time.perf_counter() - begun


def _prefill(served: _Served, seed: int) -> float:
    """Return the seconds from a long prompt's submission to its first token."""
    (prompt,) = _prompts(1, served.sizes.prompt, served.loaded.vocabulary_size, seed)
    with served.engine() as (engine, wait):
        begun = time.perf_counter()
        engine.scheduler.requests.submit(Request("r", prompt, Sampling(temperature=0.0), Stopping(1)))
        _finish(engine, wait)
        return time.perf_counter() - begun


def _finish(engine: Engine, wait: Wait) -> None:
    while not engine.scheduler.empty:
        turn = engine.turn()
        assert engine.last_failure is None, engine.last_failure
        if turn.step is None:
            wait(turn.progressed)
