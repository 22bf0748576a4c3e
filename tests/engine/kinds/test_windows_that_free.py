"""Engines whose layers keep only what they see give the tokens of transformers' `generate`, and hold fewer blocks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvmanager
from blocks import Step, blocks_for
from engine.errors import EngineUnavailable
from engine.schedule.limits import Preemption
from engine.schedule.request import Sampling
from tests.engine.families import CONTEXT, FAMILIES, FURTHER, WINDOW, Checkpoint, Family
from tests.engine_in_process import ModelEngine
from tests.reference import near_ties

BLOCK_SIZE = 4
MAX_TOKENS = 16
LENGTHS = (1, 2, WINDOW, WINDOW + 1, 21, 40, CONTEXT - MAX_TOKENS)
FEW = 1
NAMES = ("mistral", "gemma2", "qwen3 with windows", "gemma3_text", "olmo3", "cohere2", "exaone4")
SWAPS = {"host_blocks": 64, "preemption": Preemption.SWAP}
SMALL_POOL: dict[str, Any] = {"device_blocks": CONTEXT // BLOCK_SIZE, "token_budget": 16}
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"token_budget": 5, "max_sequences": 3},
    "recomputed": SMALL_POOL,
    "swapped": SMALL_POOL | SWAPS,
    "drafted": {"proposed_tokens": 3, "token_budget": 16},
    "ahead": {"ahead": True, "token_budget": 16},
}

Prompt = Callable[[int], list[int]]


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Path:
    name = request.param
    return checkpoint(FAMILIES.get(name) or Family(name, FURTHER[name]))


@pytest.fixture
def prompts(random_prompt: Prompt) -> list[list[int]]:
    return [random_prompt(length) for length in LENGTHS]


@pytest.mark.parametrize("way", WAYS)
def test_the_tokens_are_those_of_transformers(folder: Path, prompts: list[list[int]], way: str) -> None:
    engine = ModelEngine(folder, block_size=BLOCK_SIZE, kinds=True, **WAYS[way])
    assert len(engine.kinds) == 2
    answers = engine.generate(prompts, MAX_TOKENS)
    preempted = engine.scheduler.totals.preemptions
    assert bool(preempted) == (way in ("recomputed", "swapped"))
    assert near_ties(folder, prompts, answers, MAX_TOKENS) <= FEW


def test_prompts_that_hit_the_prefix_cache(folder: Path, prompts: list[list[int]], random_prompt: Prompt) -> None:
    engine = ModelEngine(folder, block_size=BLOCK_SIZE, kinds=True, token_budget=16)
    engine.generate(prompts, MAX_TOKENS)
    longer = [prompt + random_prompt(5) for prompt in prompts if len(prompt) <= 40]
    answers = engine.generate([*prompts, *longer], MAX_TOKENS)
    assert near_ties(folder, [*prompts, *longer], answers, MAX_TOKENS) <= FEW
    cached = engine.scheduler.totals.cached_tokens
    assert cached >= sum((len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts)


def test_samples_share_and_copy_the_blocks_of_all_kinds(folder: Path, random_prompt: Prompt) -> None:
    prompt, drawn = random_prompt(21), Sampling(temperature=1.0, seed=7)
    plain, kinds = (ModelEngine(folder, block_size=BLOCK_SIZE, kinds=one, token_budget=16) for one in (False, True))
    for engine in (plain, kinds):
        engine.submit(prompt, MAX_TOKENS, sampling=drawn, samples=4, request_id="r")
        engine.run()
    assert kinds.samples["r"] == plain.samples["r"]
    assert len({tuple(one) for one in kinds.samples["r"]}) == 4


class HeldBlocks:
    """The most blocks of each kind that were held after a Step."""

    def __init__(self) -> None:
        self.most = [0, 0]

    def __call__(self, _: Step, applied: kvmanager.AppliedStep) -> None:
        counts = [one.device.held for one in (applied, *applied.windows)]
        self.most = [max(pair) for pair in zip(self.most, counts, strict=True)]


@pytest.mark.parametrize("budget", [8, 16, 64])
def test_a_sequence_holds_its_window_and_what_a_step_computes(
    checkpoint: Checkpoint, random_prompt: Prompt, budget: int
) -> None:
    held = HeldBlocks()
    folder = checkpoint(FAMILIES["gemma2"])
    engine = ModelEngine(folder, block_size=BLOCK_SIZE, kinds=True, token_budget=budget, observe=held)
    prompt = random_prompt(CONTEXT - MAX_TOKENS)
    answers = engine.generate([prompt], MAX_TOKENS)
    assert near_ties(folder, [prompt], answers, MAX_TOKENS) <= FEW
    assert held.most[0] == blocks_for(CONTEXT - 1, BLOCK_SIZE)
    # One step is in flight while the blocks of the next are granted.
    [window] = engine.scheduler.capacity.windows
    assert held.most[1] <= min(held.most[0], window.most_blocks(2 * budget, BLOCK_SIZE))


def test_a_request_whose_windows_do_not_fit_is_refused_by_the_kind(folder: Path, random_prompt: Prompt) -> None:
    engine = ModelEngine(folder, block_size=BLOCK_SIZE, kinds=True, token_budget=64, device_blocks=64)
    engine.scheduler.requests.withhold([(), range(1, 61)])
    [window] = engine.scheduler.capacity.windows
    with pytest.raises(EngineUnavailable, match=f"blocks of kind {window.name}; the pool has {window.device_blocks}"):
        engine.submit(random_prompt(40), MAX_TOKENS)


def test_a_live_request_whose_windows_no_longer_fit_fails_by_the_kind(folder: Path, random_prompt: Prompt) -> None:
    engine = ModelEngine(folder, block_size=BLOCK_SIZE, kinds=True, token_budget=64, device_blocks=64)
    name = engine.submit(random_prompt(40), MAX_TOKENS)
    engine.turn_times(2)
    engine.scheduler.requests.withhold([(), range(1, 61)])
    engine.turn()
    assert "of kind window-7, but 4 are left" in engine.finished[name].detail
