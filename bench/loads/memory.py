"""Serves requests of given lengths with the real scheduler and core, and records the pool's state.

The memory that samples use does not depend on their tokens, so their runner computes nothing. Beams diverge by their
tokens, so they run on a model.
"""

import csv
import os
import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import kvmanager
from engine.run.loop import Engine
from engine.schedule.request import BeamSearch, Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Done, Runner, Sampled, StepPlan
from tests.in_process import InProcessBlocks

DATA_VARIABLE = "QUIRE_DATA"
CONTEXT_TOKENS = 1 << 20
VOCABULARY = 50_000
# Context of the paper's model, OPT.
_PAPER_TOKENS = 2048
# Requests that wait at any time: the queue is never empty until the end.
_QUEUE = 64


class Lengths(NamedTuple):
    """Tokens of a prompt, and of the output that follows."""

    prompt: int
    output: int


class DataMissing(Exception):
    """The folder with the traces is missing; the message names its setting."""


def data_file(name: str) -> Path:
    """Return a file of the folder that QUIRE_DATA names. Raises DataMissing."""
    folder = os.environ.get(DATA_VARIABLE, "")
    if not folder:
        raise DataMissing(f"{DATA_VARIABLE} names no folder with {name}")
    return Path(folder) / name


def lengths_of(name: str, prompt_column: str, output_column: str, *, empty: bool = True) -> list[Lengths]:
    """Read a file of lengths from the folder that QUIRE_DATA names. Raises DataMissing.

    Empty prompts and outputs count as one token; without `empty` such pairs are left out.
    """
    with data_file(name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    pairs = [(int(row[prompt_column]), int(row[output_column])) for row in rows]
    return [Lengths(max(1, prompt), max(1, output)) for prompt, output in pairs if empty or (prompt and output)]


def paper_lengths(count: int) -> list[Lengths]:
    """Return a sample of the PagedAttention paper's ShareGPT lengths that its model can serve. Raises DataMissing."""
    pairs = lengths_of("sharegpt_opt_lengths.csv", "prompt_tokens", "output_tokens", empty=False)
    return random.Random(1).sample([one for one in pairs if one.prompt + one.output <= _PAPER_TOKENS], count)


def scaled_to(lengths: list[Lengths], prompt_mean: float, output_mean: float) -> list[Lengths]:
    """Scale lengths to other means."""
    prompts = prompt_mean / (sum(one.prompt for one in lengths) / len(lengths))
    outputs = output_mean / (sum(one.output for one in lengths) / len(lengths))
    return [Lengths(max(1, round(one.prompt * prompts)), max(1, round(one.output * outputs))) for one in lengths]


class NoRunner:
    """Returns results at once, without computation.

    The samples of a request differ from their first token on, because common tokens would be shared after a
    preemption.
    """

    def launch(self, plan: StepPlan) -> Done:
        """Return a token for each sample: its index."""
        return Done([Sampled(index) for work in plan.work if work.samples for index in work.sample_indices])


def serve(
    requests: list[Request],
    scheduler: Scheduler,
    runner: Runner,
    watch: Callable[[kvmanager.Pool, Scheduler], None],
    ended: Callable[[int], None],
) -> None:
    """Serve all requests with a queue that is never empty, and call `watch` after each step.

    `ended` receives the number of ended requests.
    """
    blocks = InProcessBlocks(scheduler.capacity)
    engine = Engine(scheduler, runner, blocks, lambda: 0.0)
    taken = 0
    while not scheduler.empty or taken < len(requests):
        while taken < len(requests) and scheduler.waiting < _QUEUE:
            scheduler.requests.submit(requests[taken])
            taken += 1
        turn = engine.turn()
        if engine.last_failure is not None:
            raise engine.last_failure
        if turn.step is not None:
            watch(blocks.pool, scheduler)
        ended(taken - scheduler.waiting - scheduler.running)


def sampled_requests(lengths: list[Lengths], samples: int) -> list[Request]:
    """Generate requests without a common prefix."""
    draw = random.Random(1)
    return [
        Request(
            request_id=f"r{number}",
            prompt=tuple(draw.randrange(VOCABULARY) for _ in range(one.prompt)),
            sampling=Sampling(seed=number),
            stopping=Stopping(one.output),
            arrival=float(number),
            samples=((),) * samples,
        )
        for number, one in enumerate(lengths)
    ]


def searches(lengths: list[Lengths], width: int, text: Sequence[int]) -> list[Request]:
    """Generate beam searches of `width` beams, with successive pieces of a text as prompts."""
    starts = accumulate((one.prompt for one in lengths), initial=0)
    return [
        Request(
            request_id=f"r{number}",
            prompt=tuple(text[start : start + one.prompt]),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(one.output),
            arrival=float(number),
            beam_search=BeamSearch(width),
        )
        for number, (start, one) in enumerate(zip(starts, lengths, strict=False))
    ]
