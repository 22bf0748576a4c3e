"""Constraints of batched, preempted, resumed and forked requests; and failing constraints."""

import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.constraint import Constraint, ConstraintState
from engine.errors import ConstraintFailed, InvalidRequest
from engine.run.logit_rules import apply_rules
from engine.schedule.limits import Preemption
from engine.schedule.request import (
    BeamSearch,
    Failure,
    FinishReason,
    LogitRules,
    Request,
    Sampling,
    Stopping,
)
from engine.schedule.step_plan import RowRules
from services.engine.guided.grammar_sources import GrammarSpec
from services.engine.guided.grammars import CompiledGrammar, Vocabulary
from tests.engine_in_process import GREEDY, ModelEngine
from tests.reference import beam_reference
from tests.tiny_models import VOCABULARY

BLOCK = 4
END = 0
SAMPLED = Sampling(temperature=1.0, seed=7)
PATTERN = r"([a-f]{2,5} (north|[0-9]{2,4})\. ){1,2}"
PROMPT = tuple(random.Random(1).randrange(3, 380) for _ in range(10))
MOST = 40


def mask_of(tokens: Iterable[int]) -> bytes:
    number = sum(1 << token for token in set(tokens))
    return number.to_bytes(-(-number.bit_length() // 8), "little")


# Masks


@given(st.lists(st.none() | st.sets(st.integers(0, 60), min_size=1), min_size=1, max_size=6))
def test_a_row_keeps_what_its_mask_allows_and_no_other_row_changes(rows: list[set[int] | None]) -> None:
    vocabulary = 37  # masks may be shorter, and longer too
    logits = torch.randn(len(rows), vocabulary)
    kept = apply_rules(logits, [None if allowed is None else RowRules(mask=mask_of(allowed)) for allowed in rows])
    for row, allowed in enumerate(rows):
        tokens = range(vocabulary) if allowed is None else allowed
        for token in range(vocabulary):
            assert kept[row, token] == (logits[row, token] if token in tokens else float("-inf"))


def test_a_mask_and_other_rules_work_together() -> None:
    rules = RowRules(
        LogitRules(logit_bias=((2, 9.0), (4, 99.0))), banned_token_ids=frozenset({3}), mask=mask_of([2, 3])
    )
    assert apply_rules(torch.zeros(1, 6), [rules]).tolist() == [[-float("inf")] * 2 + [9.0] + [-float("inf")] * 3]


# In a running engine


@pytest.fixture(scope="module")
def vocabulary(tiny_model: Callable[[str], Path]) -> Vocabulary:
    return Vocabulary(tiny_model("llama"), VOCABULARY, [END])


@pytest.fixture(scope="module")
def constraint(vocabulary: Vocabulary) -> Constraint:
    return CompiledGrammar(vocabulary, GrammarSpec("regex", PATTERN))


@pytest.fixture
def alone(folder: Path, constraint: Constraint) -> list[list[int]]:
    return answers(ModelEngine(folder, block_size=BLOCK), constraint)


def answers(engine: ModelEngine, constraint: Constraint) -> list[list[int]]:
    """Answers of three samples in an idle engine."""
    name = engine.submit(PROMPT, MOST, sampling=SAMPLED, samples=3, stop=[END], constraint=constraint)
    engine.run()
    return engine.samples[name]


def text(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return vocabulary.tokens.decode_str([token for token in tokens if token != END])


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(temperature=9.0, top_k=40, seed=3)])
def test_every_output_satisfies_the_constraint(
    folder: Path, vocabulary: Vocabulary, constraint: Constraint, sampling: Sampling
) -> None:
    engine = ModelEngine(folder)
    name = engine.submit(PROMPT, MOST, sampling=sampling, samples=4, stop=[END], constraint=constraint)
    free = engine.submit(PROMPT, 30, sampling=sampling, stop=[END])
    engine.run()
    for member, tokens in zip(engine.finished[name].members, engine.samples[name], strict=True):
        assert re.fullmatch(PATTERN, text(vocabulary, tokens))
        assert member.finish is FinishReason.STOP
    assert [engine.tokens[free]] == ModelEngine(folder).generate([PROMPT], 30, sampling=sampling, stop=[END])


def test_a_complete_output_ends_immediately(folder: Path, vocabulary: Vocabulary) -> None:
    constraint = CompiledGrammar(vocabulary, GrammarSpec("regex", "abc?"))
    engine = ModelEngine(folder)
    bias = LogitRules(logit_bias=((END, -1e9),))
    name = engine.submit(PROMPT, 3, stop=[END], constraint=constraint, logit_rules=bias)
    engine.run()
    (member,) = engine.finished[name].members
    assert text(vocabulary, engine.tokens[name]) == "abc"
    assert (member.finish, member.stop_token) == (FinishReason.STOP, None)


def test_a_constraint_without_text_ends_with_the_end_token(folder: Path, vocabulary: Vocabulary) -> None:
    engine = ModelEngine(folder)
    constraint = CompiledGrammar(vocabulary, GrammarSpec("regex", "(?:)"))
    assert engine.generate([PROMPT], 9, stop=[END], constraint=constraint) == [[END]]


def test_max_tokens_truncates_an_answer(
    folder: Path, vocabulary: Vocabulary, alone: list[list[int]], constraint: Constraint
) -> None:
    engine = ModelEngine(folder)
    name = engine.submit(PROMPT, 7, sampling=SAMPLED, samples=3, stop=[END], constraint=constraint)
    engine.run()
    assert engine.samples[name] == [tokens[:7] for tokens in alone]
    assert {member.finish for member in engine.finished[name].members} == {FinishReason.LENGTH}


@pytest.mark.parametrize("budget", [3, 512])
def test_answers_do_not_depend_on_chunks_and_other_requests(
    folder: Path, constraint: Constraint, vocabulary: Vocabulary, alone: list[list[int]], budget: int
) -> None:
    engine = ModelEngine(folder, block_size=BLOCK, token_budget=budget, max_sequences=min(64, budget))
    other = CompiledGrammar(vocabulary, GrammarSpec("json_object"))
    engine.submit(PROMPT[2:], 20, sampling=Sampling(seed=2), stop=[END], constraint=other)
    engine.submit(PROMPT[1:], 20, sampling=Sampling(seed=3))
    assert answers(engine, constraint) == alone


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
@pytest.mark.parametrize("head_start", [20, 32, 44])
def test_answers_are_the_same_after_preemptions_of_each_kind(
    folder: Path, constraint: Constraint, alone: list[list[int]], preemption: Preemption, head_start: int
) -> None:
    blocks = 3 * -(-(len(PROMPT) + MOST) // BLOCK)
    engine = ModelEngine(folder, block_size=BLOCK, device_blocks=blocks, host_blocks=blocks, preemption=preemption)
    grows = [number % 300 + 3 for number in range(blocks * BLOCK - 78)]
    engine.submit(grows, 70, priority=-1)  # until it needs nearly all blocks
    engine.turn_times(head_start)
    name = engine.submit(PROMPT, MOST, sampling=SAMPLED, samples=3, stop=[END], constraint=constraint)
    engine.run()
    group = engine.finished[name]
    assert engine.samples[name] == alone
    assert group.stats.preemptions >= 1
    assert (group.stats.swapped_tokens > 0) == (preemption is Preemption.SWAP)


def test_a_sample_uses_its_own_mask_if_the_trunk_has_more_tokens(
    folder: Path, vocabulary: Vocabulary, alone: list[list[int]], constraint: Constraint
) -> None:
    engine = ModelEngine(folder, block_size=BLOCK)
    samples = (tuple(alone[0][:6]), tuple(alone[0][:3]))
    engine.take(Request("r", PROMPT, SAMPLED, Stopping(MOST, frozenset({END})), samples=samples, constraint=constraint))
    engine.run()
    for begun, rest in zip(samples, engine.samples["r"], strict=True):
        assert re.fullmatch(PATTERN, text(vocabulary, [*begun, *rest]))


# Refusals


def test_generated_tokens_that_violate_the_constraint_are_refused(folder: Path, constraint: Constraint) -> None:
    engine = ModelEngine(folder)
    with pytest.raises(InvalidRequest) as refused:
        engine.take(Request("r", PROMPT, GREEDY, Stopping(9), samples=((), (350,)), constraint=constraint))
    assert refused.value.field == "samples.generated_token_ids"
    assert engine.scheduler.empty


# Failures


@dataclass
class FailingConstraint:
    """A constraint that allows everything and fails after some tokens."""

    remaining: int
    complete: bool = False

    def start(self) -> ConstraintState:
        return replace(self)

    def copy(self) -> ConstraintState:
        return replace(self)

    def allowed(self) -> bytes:
        if self.remaining < 0:
            raise ConstraintFailed("injected")
        return b"\xff" * (VOCABULARY // 8)

    def advance(self, token_id: int) -> None:
        self.remaining -= 1


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("preempted", [False, True])
def test_a_state_that_fails_ends_its_request_and_no_other(folder: Path, samples: int, preempted: bool) -> None:
    engine = ModelEngine(folder, block_size=BLOCK, device_blocks=24 if preempted else 256)
    other = engine.submit(PROMPT, 40, sampling=SAMPLED, priority=-1)
    failing = engine.submit(PROMPT, 20, sampling=SAMPLED, samples=samples, constraint=FailingConstraint(9))
    engine.run()
    group = engine.finished[failing]
    assert group.failure is Failure.CONSTRAINT
    assert group.detail == "the output cannot continue under its constraint: injected"
    assert {member.finish for member in group.members} == {FinishReason.FAILED}
    assert max(map(len, engine.samples[failing])) == 9
    assert engine.failures == []
    assert [engine.tokens[other]] == ModelEngine(folder).generate([PROMPT], 40, sampling=SAMPLED)


@pytest.mark.parametrize("preemption", [None, Preemption.RECOMPUTE, Preemption.SWAP])
def test_constrained_beams_equal_those_of_transformers(
    folder: Path, vocabulary: Vocabulary, constraint: Constraint, preemption: Preemption | None
) -> None:
    def allowed(_batch: int, tokens: torch.Tensor) -> list[int]:
        state = constraint.start()
        try:
            for token in tokens[len(PROMPT) :].tolist():
                state.advance(token)
            mask = int.from_bytes(state.allowed(), "little")
        except ConstraintFailed:
            return [END]  # tokens after the end are ignored
        return [token for token in range(VOCABULARY) if mask >> token & 1]

    blocks = 4 * -(-(len(PROMPT) + MOST) // BLOCK)
    engine = ModelEngine(
        folder,
        block_size=BLOCK,
        device_blocks=blocks if preemption else 256,
        host_blocks=blocks,
        preemption=preemption or Preemption.RECOMPUTE,
    )
    if preemption:
        grows = [number % 300 + 3 for number in range(blocks * BLOCK - 80)]
        engine.submit(grows, 70, priority=-1)  # until it needs nearly all blocks
        engine.turn_times(40)
    search = BeamSearch(4)
    name = engine.submit(PROMPT, MOST, beam_search=search, samples=3, stop=[END], constraint=constraint)
    engine.run()
    expected = beam_reference(folder, PROMPT, search, MOST, 3, allowed, eos_token_id=[END])
    assert engine.samples[name] == expected.token_ids
    assert [one.score for one in engine.finished[name].answers] == pytest.approx(expected.scores, abs=1e-4)
    assert all(re.fullmatch(PATTERN, text(vocabulary, tokens)) for tokens in engine.samples[name])
    assert (engine.finished[name].stats.preemptions > 0) == (preemption is not None)


def test_a_constraint_with_fewer_texts_than_beams_returns_all_of_them(folder: Path, vocabulary: Vocabulary) -> None:
    engine = ModelEngine(folder)
    constraint = CompiledGrammar(vocabulary, GrammarSpec("regex", "x|y"))
    name = engine.submit(PROMPT, 5, beam_search=BeamSearch(4), samples=4, stop=[END], constraint=constraint)
    engine.run()
    texts = [text(vocabulary, tokens) for tokens in engine.samples[name]]
    assert (sorted(texts[:2]), texts[2:]) == (["x", "y"], ["", ""])
