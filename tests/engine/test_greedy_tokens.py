"""Greedy tokens equal those of transformers' `generate` in float32, with any block size and step budget."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import InvalidRequest
from engine.schedule.request import FinishReason
from tests.engine_in_process import ModelEngine
from tests.reference import differences, greedy_reference, near_ties

FAMILIES = ("llama", "gpt2", "opt")
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 130, 301)
MAX_TOKENS = 12
# Of 168 tokens a run; random weights make choices clear.
FEW = 1

Prompt = Callable[[int], list[int]]
Tiny = Callable[[str], Path]


@pytest.fixture
def prompts(random_prompt: Prompt) -> list[list[int]]:
    return [random_prompt(length) for length in LENGTHS]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("block_size", "token_budget"), [(1, 64), (8, 64), (16, 64), (64, 64), (16, 2048)])
def test_tokens_equal_those_of_transformers_at_any_block_size_and_budget(
    tiny_model: Tiny, prompts: list[list[int]], family: str, block_size: int, token_budget: int
) -> None:
    folder = tiny_model(family)
    roomy = sum(-(-(len(prompt) + MAX_TOKENS) // block_size) for prompt in prompts)
    engine = ModelEngine(folder, block_size=block_size, device_blocks=roomy, token_budget=token_budget)
    answers = engine.generate(prompts, MAX_TOKENS)
    assert engine.scheduler.totals.preemptions == 0
    assert near_ties(folder, prompts, answers, MAX_TOKENS) <= FEW


@pytest.mark.parametrize(
    ("family", "block_size", "device_blocks", "least_preemptions"),
    [
        ("llama", 1, 80, 10),
        ("llama", 4, 20, 10),
        ("llama", 8, 10, 10),
        ("llama", 16, 6, 3),
        ("gpt2", 4, 20, 10),
        ("opt", 4, 20, 10),
    ],
)
def test_tokens_are_the_same_after_preemptions_in_a_small_pool(
    tiny_model: Tiny, random_prompt: Prompt, family: str, block_size: int, device_blocks: int, least_preemptions: int
) -> None:
    folder = tiny_model(family)
    prompts = [random_prompt(length) for length in range(1, 25, 2)]
    engine = ModelEngine(folder, block_size=block_size, device_blocks=device_blocks, token_budget=64)
    answers = engine.generate(prompts, 40)
    assert engine.scheduler.totals.preemptions >= least_preemptions
    assert near_ties(folder, prompts, answers, 40) <= FEW


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stop_token_ends_an_answer_where_it_ends_that_of_transformers(
    tiny_model: Tiny, prompts: list[list[int]], family: str
) -> None:
    folder = tiny_model(family)
    likely = {tokens[len(tokens) // 2] for tokens in greedy_reference(folder, prompts, MAX_TOKENS)}
    engine = ModelEngine(folder)
    answers = engine.generate(prompts, MAX_TOKENS, stop=likely)
    ends = {sequence.finish for sequence in engine.finished.values()}
    assert FinishReason.STOP in ends
    assert all(group.members[0].stop_token == group.members[0].tokens[-1] for group in engine.finished.values())
    assert near_ties(folder, prompts, answers, MAX_TOKENS, likely) <= FEW


def test_the_comparison_detects_a_wrong_a_missing_and_an_extra_token(tiny_model: Tiny) -> None:
    folder, prompt = tiny_model("llama"), [5, 6, 7]
    [right] = greedy_reference(folder, [prompt], 6)
    assert differences(folder, prompt, right, 6) == []
    wrong = [*right[:2], (right[2] + 1) % 384]
    first, *_ = differences(folder, prompt, [*wrong, *right[3:]], 6)
    assert (first.place, first.token, first.reference) == (2, wrong[2], right[2])
    assert first.gap > 1e-4
    assert [d.place for d in differences(folder, prompt, right[:5], 6)] == [5]
    assert [d.place for d in differences(folder, prompt, [*right, 1], 6)] == [6]
    with pytest.raises(AssertionError):
        near_ties(folder, [prompt], [wrong], 6)
    with pytest.raises(AssertionError):
        near_ties(folder, [prompt], [[]], 6)


class TestFitsExactly:
    """A pool of 2 blocks of 4 tokens: 8 slots."""

    @pytest.fixture
    def engine(self, tiny_model: Tiny) -> ModelEngine:
        return ModelEngine(tiny_model("llama"), block_size=4, device_blocks=2, token_budget=64)

    @pytest.mark.parametrize(("length", "max_tokens"), [(4, 6), (8, 2), (9, 1), (1, 9)])
    def test_one_token_more_is_refused_naming_both_numbers(
        self, engine: ModelEngine, random_prompt: Prompt, length: int, max_tokens: int
    ) -> None:
        with pytest.raises(InvalidRequest, match=r"take 3 blocks; the pool has 2") as refused:
            engine.submit(random_prompt(length), max_tokens)
        assert refused.value.field == ("prompt" if length > 8 else "stopping.max_tokens")
        assert engine.scheduler.empty

    # The last token is never fed: a prompt of 4 and an answer of 5 tokens take 8 slots.
    @pytest.mark.parametrize(
        ("length", "max_tokens", "most_held"), [(3, 1, 1), (4, 1, 1), (3, 2, 1), (4, 2, 2), (4, 5, 2), (8, 1, 2)]
    )
    def test_a_sequence_takes_no_block_beyond_its_slots_and_may_take_them_all(
        self, engine: ModelEngine, random_prompt: Prompt, length: int, max_tokens: int, most_held: int
    ) -> None:
        prompt = random_prompt(length)
        answers = engine.generate([prompt], max_tokens)
        assert near_ties(engine.folder, [prompt], answers, max_tokens) <= 1
        assert engine.blocks.session.totals.peak_held_blocks == most_held
        assert engine.scheduler.totals.preemptions == 0
