"""Seconds of bringing one preempted sequence back: by swapping its blocks, and by recomputing its tokens."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import Any

# First, because it sets how threads of torch wait.
from bench.loads.engine_worker import BFLOAT16, demo_parts, terms_of  # isort: skip
from bench.engine.kernels import Ways, take_turns
from bench.papers.case import Values
from blocks import Copy, blocks_for
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Copies, Runner, StepPlan, Work
from services.engine.startup.assembly import EngineParts


def recovery_seconds(block_sizes: Sequence[int], tokens: int, repetitions: int) -> Values:
    """Return the seconds of `swap_out`, `swap_in` and `recompute` of a sequence of `tokens`, by block size.

    Each block size has an engine of the demo model. Its runner copies the blocks, from random places to random places,
    and computes the tokens as one prompt. All alternate.
    """
    ways: Ways = {}
    terms: dict[str, Any] = {}
    for size in block_sizes:
        own, parts = _ways(size, tokens)
        ways |= {f"{size}_{name}": way for name, way in own.items()}
        terms = asdict(terms_of(parts, "a sequence"))
    found = take_turns(ways, range(repetitions + 1))
    seconds = {
        str(size): {name: found[f"{size}_{name}"] for name in ("swap_out", "swap_in", "recompute")}
        for size in block_sizes
    }
    return {"seconds": seconds, "tokens": tokens, "terms": terms}


def _ways(block_size: int, tokens: int) -> tuple[Ways, EngineParts]:
    held = blocks_for(tokens, block_size)
    sizes = {"block_size": block_size, "host_blocks": 2 * held, "token_budget": tokens}
    parts = demo_parts(2 * held, device="cpu", **sizes, **BFLOAT16)
    draw = random.Random(block_size)
    device, host = (draw.sample(range(1, 2 * held + 1), 2 * held) for _ in range(2))
    out = tuple(Copy(*pair) for pair in zip(device[:held], host[:held], strict=True))
    back = tuple(Copy(*pair) for pair in zip(host[:held], device[held:], strict=True))
    launch = _launcher(parts.runner)
    ways: Ways = {
        "swap_out": partial(launch, (Copies(device_to_host=out),), ()),
        "swap_in": partial(launch, (Copies(host_to_device=back),), ()),
        "recompute": partial(launch, (), (_prompt(parts, tokens, tuple(device[:held])),)),
    }
    return ways, parts


def _launcher(runner: Runner) -> Callable[[tuple[Copies, ...], tuple[Work, ...]], object]:
    steps = count(1)
    return lambda copies, work: runner.launch(StepPlan(next(steps), copies, work)).result()


def _prompt(parts: EngineParts, tokens: int, table: tuple[int, ...]) -> Work:
    draw = random.Random(1)
    ids = tuple(draw.randrange(10, parts.loaded.vocabulary_size) for _ in range(tokens))
    return Work(1, ids, 0, table, True, Sampling(temperature=0.0))
