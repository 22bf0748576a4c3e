"""Judges one case: its checkpoint is served in five ways, and each answer compared with transformers' `generate`."""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from engine.errors import ModelUnsupported
from engine.model.model_shape import read_shape
from tests.engine_in_process import ModelEngine, loaded_model
from tests.model_types.cases import Case
from tests.model_types.checkpoints import write_checkpoint
from tests.model_types.sizes import CONTEXT, SIZES
from tests.reference import NEAR_TIE, differences, greedy_reference

BLOCK_SIZE = 4
MAX_TOKENS = 24
# Shorter than a window, longer, and as long as the context allows.
LENGTHS = (5, 23, CONTEXT - MAX_TOKENS - 2)
# Of blocks: all prompts fit, but not all texts.
SMALL_POOL = 42

Answers = list[list[int]]


class Judgement(NamedTuple):
    """What became of a case.

    `reason` says why the outcome is another than `equal`. `tokens` counts the different ones of the reference, `ties`
    near ties, `hits` the prompt tokens that the second way found cached, `preemptions` those of the small pool. `plan`
    is empty, or says how the planned geometry differs from the loaded one. `unwritten` are tensors that transformers
    leaves uninitialized.
    """

    outcome: str
    reason: str = ""
    tokens: int = 0
    ties: int = 0
    hits: int = 0
    preemptions: int = 0
    plan: str = ""
    unwritten: tuple[str, ...] = ()


Judge = Callable[[Case, Path], Judgement]


class Way(NamedTuple):
    """Answers of one way of serving, with the prompt tokens found cached and the preemptions."""

    name: str
    answers: Answers
    hits: int = 0
    preemptions: int = 0


class Wrong(Exception):
    """An answer that is none of transformers'."""


def judge(case: Case, folder: Path) -> Judgement:
    """Write the checkpoint of a case and judge it. Faults of the engine raise anything but ModelUnsupported."""
    prompts = random_prompts()
    try:
        unwritten = tuple(write_checkpoint(case, folder))
        expected = greedy_reference(folder, prompts, MAX_TOKENS)
    except Exception as error:  # classes of transformers may raise anything
        if "allocate memory" in str(error):  # torch's way to say it
            raise MemoryError from error
        return Judgement("not buildable", _first_line(error))
    found = Judgement("equal", tokens=len({token for tokens in expected for token in tokens}), unwritten=unwritten)
    try:
        geometry = loaded_model(folder).geometry
    except ModelUnsupported as error:
        return found._replace(outcome="refused", reason=str(error).removeprefix(f"{folder.name}: "))
    return served(folder, folder, prompts, found._replace(plan=_planned(folder, geometry)))


def random_prompts() -> list[list[int]]:
    """Return three prompts without special tokens, always the same."""
    source = random.Random(20261128)
    return [[source.randrange(13, SIZES["vocab_size"]) for _ in range(length)] for length in LENGTHS]


def served(folder: Path, reference: Path, prompts: Answers, found: Judgement) -> Judgement:
    """Serve a folder in five ways, and compare each answer with that of transformers to `reference`."""
    for way in _ways(folder, prompts):
        found = found._replace(hits=max(found.hits, way.hits), preemptions=max(found.preemptions, way.preemptions))
        try:
            found = found._replace(ties=found.ties + _near_ties(reference, prompts, way.answers))
        except Wrong as error:
            return found._replace(outcome="wrong", reason=f"{way.name}: {error}")
    return found


def _ways(folder: Path, prompts: Answers) -> Iterator[Way]:
    engine = ModelEngine(folder, block_size=BLOCK_SIZE, kinds=True)
    yield Way("alone", [engine.generate([prompt], MAX_TOKENS)[0] for prompt in prompts])
    before = len(engine.cached)
    again = [engine.generate([prompt], MAX_TOKENS)[0] for prompt in prompts]
    yield Way("again", again, hits=sum(list(engine.cached.values())[before:]))
    yield Way("together", ModelEngine(folder, block_size=BLOCK_SIZE, kinds=True).generate(prompts, MAX_TOKENS))
    chunks = ModelEngine(folder, block_size=BLOCK_SIZE, kinds=True, token_budget=5, max_sequences=3)
    yield Way("in chunks", chunks.generate(prompts, MAX_TOKENS))
    small = ModelEngine(folder, block_size=BLOCK_SIZE, kinds=True, device_blocks=SMALL_POOL, token_budget=16)
    yield Way("small pool", small.generate(prompts, MAX_TOKENS), preemptions=small.scheduler.totals.preemptions)


def _near_ties(folder: Path, prompts: Answers, answers: Answers) -> int:
    """Count near ties. Raises Wrong with the first difference that is none."""
    found = [
        (len(prompt), difference)
        for prompt, tokens in zip(prompts, answers, strict=True)
        for difference in differences(folder, prompt, tokens, MAX_TOKENS)
    ]
    for length, one in found:
        if not one.gap < NEAR_TIE:
            gap = "of an early end" if math.isinf(one.gap) else f"{one.gap:.1g} apart"
            raise Wrong(f"token {one.place} after {length} tokens is {one.token}, not {one.reference}, {gap}")
    return len(found)


def _planned(folder: Path, geometry: object) -> str:
    """Return how the geometry that `quire plan` computes differs from the loaded one."""
    try:
        planned = read_shape(folder, torch.float32).geometry
    except ModelUnsupported as error:
        return str(error).removeprefix(f"{folder.name}: ")
    return "" if planned == geometry else f"planned {planned}, loaded {geometry}"


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160].rstrip()
