"""Bad words: the bans of transformers, in batches, samples, beams, preempted and resumed requests."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from engine.bad_words import MAX_LENGTH, MAX_SEQUENCES, BadWords
from engine.errors import InvalidRequest
from engine.run.logit_rules import apply_rules
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Preemption
from engine.schedule.request import BeamSearch, LogitRules, Request, Sampling, Stopping
from engine.schedule.sequence_group import Group
from tests.engine_in_process import GREEDY, ModelEngine
from tests.reference import NEAR_TIE, beam_reference, reference_logprobs

BLOCK = 4
PROMPT = tuple(random.Random(1).randrange(3, 380) for _ in range(10))
SAMPLED = Sampling(temperature=1.0, seed=7)
MOST = 40

Words = tuple[tuple[int, ...], ...]


def rules_with(words: Words) -> LogitRules:
    return LogitRules(bad_words=BadWords(words))


def free_output(folder: Path, sampling: Sampling = GREEDY) -> list[int]:
    """Return the output that no rule changes."""
    [tokens] = ModelEngine(folder).generate([PROMPT], MOST, sampling=sampling)
    return tokens


def words_of(tokens: Sequence[int]) -> Words:
    """Return words of one, two and five tokens, all of them parts of an output."""
    return ((tokens[2],), tuple(tokens[5:7]), tuple(tokens[10:12]), tuple(tokens[20:25]))


def holds(tokens: Sequence[int], words: Words) -> bool:
    places = range(len(tokens))
    return any(tuple(tokens[at : at + len(word)]) == word for word in words for at in places)


# Equal to transformers


@given(
    words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple), min_size=1, max_size=8).map(tuple),
    outputs=st.lists(st.lists(st.integers(0, 5), max_size=7), min_size=1, max_size=4),
)
def test_each_row_has_the_bans_of_transformers(words: Words, outputs: list[list[int]]) -> None:
    logits = torch.randn(len(outputs), 9)
    request = Request(
        "r", (8, 0, 1), GREEDY, Stopping(50), samples=tuple(map(tuple, outputs)), logit_rules=rules_with(words)
    )
    members = Group.of(request, iter(range(9))).members
    applied = apply_rules(logits, [member.rules_at(len(member.tokens)) for member in members])
    processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
    for row, output in enumerate(outputs):
        # transformers counts the prompt too, so here the prompt is a token of no word.
        assert torch.equal(
            applied[row : row + 1], processor(torch.tensor([[8, *output]]), logits[row : row + 1].clone())
        )


@pytest.mark.parametrize("ahead", [False, True])
def test_greedy_output_is_the_likeliest_without_bad_words(folder: Path, ahead: bool) -> None:
    words = words_of(free_output(folder))
    engine = ModelEngine(folder, block_size=BLOCK, ahead=ahead)
    engine.submit(PROMPT[3:], 30, sampling=Sampling(seed=3))  # in the same batch, and unchanged
    name = engine.submit(PROMPT, MOST, logit_rules=rules_with(words))
    single = engine.submit(PROMPT, MOST, logit_rules=rules_with(words[:1]))  # static, so planned ahead
    engine.run()
    for answer, banned in ((engine.tokens[name], words), (engine.tokens[single], words[:1])):
        processor = NoBadWordsLogitsProcessor([list(word) for word in banned], eos_token_id=None)
        rows = reference_logprobs(folder, [*PROMPT, *answer])[len(PROMPT) - 1 :]
        for place, token in enumerate(answer):
            allowed = processor(torch.tensor([[0, *answer[:place]]]), rows[place : place + 1].clone())[0]
            assert float(allowed.max() - allowed[token]) < NEAR_TIE
    assert engine.tokens[name] != free_output(folder)


def test_beams_equal_those_of_transformers(folder: Path) -> None:
    search = BeamSearch(4)
    engine = ModelEngine(folder, block_size=BLOCK)
    first = engine.submit(PROMPT, 16, beam_search=search, samples=4)
    engine.run()
    best = engine.samples[first][0]
    words = ((best[1],), tuple(best[4:6]), tuple(best[7:10]))
    name = engine.submit(PROMPT, 16, beam_search=search, samples=4, logit_rules=rules_with(words))
    engine.run()
    expected = beam_reference(folder, PROMPT, search, 16, 4, bad_words_ids=[list(word) for word in words])
    assert engine.samples[name] == expected.token_ids
    assert engine.samples[name][0] != best


# In a running engine


@pytest.fixture
def sampled_words(folder: Path) -> Words:
    return words_of(free_output(folder, SAMPLED))


@pytest.fixture
def alone(folder: Path, sampled_words: Words) -> list[list[int]]:
    """Return the samples of a request that runs alone."""
    engine = ModelEngine(folder)
    name = engine.submit(PROMPT, MOST, sampling=SAMPLED, samples=3, logit_rules=rules_with(sampled_words))
    engine.run()
    assert not any(holds(tokens, sampled_words) for tokens in engine.samples[name])
    return engine.samples[name]


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
def test_samples_are_the_same_after_preemptions(
    folder: Path, sampled_words: Words, alone: list[list[int]], preemption: Preemption
) -> None:
    blocks = 3 * -(-(len(PROMPT) + MOST) // BLOCK)
    engine = ModelEngine(folder, block_size=BLOCK, device_blocks=blocks, host_blocks=blocks, preemption=preemption)
    grows = [number % 300 + 3 for number in range(blocks * BLOCK - 78)]
    engine.submit(grows, 70, priority=-1)  # until it needs nearly all blocks
    engine.turn_times(20)
    name = engine.submit(PROMPT, MOST, sampling=SAMPLED, samples=3, logit_rules=rules_with(sampled_words))
    engine.run()
    assert engine.samples[name] == alone
    assert engine.finished[name].stats.preemptions >= 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_resumed_request_continues_within_a_word(
    folder: Path, sampled_words: Words, alone: list[list[int]], ahead: bool
) -> None:
    for done in (5, 6, 11, 21, 24):
        engine = ModelEngine(folder, block_size=BLOCK, ahead=ahead)
        begun = tuple(tuple(tokens[:done]) for tokens in alone)
        engine.take(Request("r", PROMPT, SAMPLED, Stopping(MOST), samples=begun, logit_rules=rules_with(sampled_words)))
        engine.run()
        assert [[*start, *rest] for start, rest in zip(begun, engine.samples["r"], strict=True)] == alone


# Refusals


def refused_field(words: Words, allowed: tuple[int, ...] = (), stopping: Stopping | None = None) -> str | None:
    rules = LogitRules(allowed_token_ids=allowed, bad_words=BadWords(words))
    try:
        Capacity(100, 200, 16, 16).check(Request("r", (1,), GREEDY, stopping or Stopping(9), logit_rules=rules))
    except InvalidRequest as refused:
        return refused.field
    return None


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (((5, 200),), "logit_rules.bad_words"),
        (((-1,),), "logit_rules.bad_words"),
        (((),), "logit_rules.bad_words"),
        (((5,) * (MAX_LENGTH + 1),), "logit_rules.bad_words"),
        (((5,),) * (MAX_SEQUENCES + 1), "logit_rules.bad_words"),
        (tuple((token,) for token in range(200)), "logit_rules.bad_words"),
        (((5,) * MAX_LENGTH,) * MAX_SEQUENCES, None),
        (tuple((token,) for token in range(1, 200)), None),
    ],
    ids=["beyond the vocabulary", "negative", "empty", "long", "many", "all tokens", "the most", "all but one"],
)
def test_words_out_of_bounds_are_refused(words: Words, field: str | None) -> None:
    assert refused_field(words) == field


@pytest.mark.parametrize(
    ("words", "allowed", "field"),
    [
        (((5,), (6,)), (5, 6), "logit_rules.allowed_token_ids"),
        (((5, 5), (5, 6)), (5, 6), "logit_rules.bad_words"),
        (((5,), (6, 6)), (5, 6), "logit_rules.bad_words"),
        (((6, 5), (5, 6, 6), (6, 6)), (5, 6), "logit_rules.bad_words"),
        (((5, 5), (6, 6)), (5, 6), None),
        (((7, 5), (7, 6)), (5, 6), None),
        (((5, 6, 5), (6, 6)), (5, 6), "logit_rules.bad_words"),
        (((5, 6, 5), (6, 5, 6)), (5, 6), None),
    ],
)
def test_words_that_leave_no_token_at_some_place_are_refused(
    words: Words, allowed: tuple[int, ...], field: str | None
) -> None:
    assert refused_field(words, allowed) == field


@pytest.mark.parametrize(
    ("words", "min_tokens", "field"),
    [
        (((5, 5),), 1, None),  # after a token the end may follow
        (((5, 5),), 2, "logit_rules.bad_words"),
        (((5,),), 0, None),
        (((5,),), 1, "logit_rules.allowed_token_ids"),
    ],
)
def test_min_tokens_count_for_what_is_left(words: Words, min_tokens: int, field: str | None) -> None:
    assert refused_field(words, (5, 9), Stopping(9, frozenset({9}), min_tokens)) == field
