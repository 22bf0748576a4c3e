"""Requests resumed after a failover: the same tokens as undisturbed, and ended samples unchanged."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.constraint import Constraint
from engine.errors import InvalidRequest
from engine.schedule.request import BeamSearch, FinishReason, Request, Sampling, Stopping
from services.engine.guided.grammar_sources import GrammarSpec
from services.engine.guided.grammars import CompiledGrammar, Vocabulary
from tests.engine.schedule.random_resumptions import BLOCK, END, VOCABULARY, run_round
from tests.engine_in_process import GREEDY, ModelEngine

PROMPT = tuple(range(40, 50))
SAMPLED = Sampling(temperature=1.0, seed=7)
MOST = 12


@pytest.fixture(scope="module")
def constraints(tiny_model: Callable[[str], Path]) -> Sequence[Constraint]:
    return compiled(Vocabulary(tiny_model("llama"), VOCABULARY, [END]))


def compiled(vocabulary: Vocabulary) -> Sequence[Constraint]:
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}'
    languages = (
        GrammarSpec("regex", r"([a-f]{2,5} (north|[0-9]{2,4})\. ){1,2}"),
        GrammarSpec("regex", r"[ab]{4,9}"),
        GrammarSpec("json_schema", schema),
    )
    return [CompiledGrammar(vocabulary, language) for language in languages]


@pytest.fixture
def alone(folder: Path) -> list[list[int]]:
    """Answers of three samples in an idle engine."""
    engine = ModelEngine(folder, block_size=BLOCK)
    engine.take(three())
    engine.run()
    return engine.samples["r"]


def three(**fields: object) -> Request:
    return replace(Request("r", PROMPT, SAMPLED, Stopping(MOST), samples=((), (), ())), **fields)  # type: ignore[arg-type]


def test_random_requests_continue_after_a_failover_with_the_same_tokens(
    folder: Path, constraints: Sequence[Constraint]
) -> None:
    rounds = [run_round(folder, constraints, number) for number in range(4)]
    for counts in zip(*rounds, strict=True):
        assert sum(counts) > 1, rounds


# Samples that have ended


def test_ended_samples_are_not_computed_and_hold_no_block(folder: Path, alone: list[list[int]]) -> None:
    engine = ModelEngine(folder, block_size=BLOCK)
    engine.take(three(samples=(tuple(alone[0]), tuple(alone[1][:5]), (1, 2, END)), ended=frozenset({0, 2})))
    engine.turn()
    assert (engine.scheduler._queue.by_request["r"].width, len(engine.blocks.pool.sequences)) == (1, 1)
    engine.run()
    assert engine.samples["r"] == [[], alone[1][5:], []], "a sample keeps the random numbers of its index"
    assert engine.scheduler.totals.computed_tokens == len(PROMPT) + MOST - 1
    reasons = [member.finish for member in engine.finished["r"].members]
    assert reasons == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]


def test_ended_samples_do_not_count_against_the_limits(folder: Path) -> None:
    engine = ModelEngine(folder, block_size=BLOCK, device_blocks=6, max_sequences=1)
    engine.take(three(ended=frozenset({0, 1})))
    engine.run()
    assert [len(tokens) for tokens in engine.samples["r"]] == [0, 0, MOST]


def test_cancelling_a_request_with_ended_samples_ends_only_the_others(folder: Path) -> None:
    engine = ModelEngine(folder, block_size=BLOCK)
    engine.take(three(ended=frozenset({1})))
    engine.turn()
    engine.scheduler.requests.end_sample("r", 1)
    engine.scheduler.requests.cancel("r")
    engine.run()
    reasons = [member.finish for member in engine.finished["r"].members]
    assert reasons == [FinishReason.CANCELLED, FinishReason.STOP, FinishReason.CANCELLED]


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"ended": frozenset({0, 1, 2})}, "samples.ended", "must leave at least one sample"),
        (
            {"samples": ((), (5, VOCABULARY)), "ended": frozenset({1})},
            "samples.generated_token_ids",
            "must be between 0 and 383, not 384",
        ),
        (
            {"samples": ((), tuple(range(10, 22)))},
            "samples.generated_token_ids",
            "fewer than stopping.max_tokens .12. tokens, not 12",
        ),
        (
            {"samples": ((), (9, END)), "stopping": Stopping(MOST, frozenset({END}))},
            "samples.generated_token_ids",
            "of sample 1 has stop token 0",
        ),
        (
            {"samples": ((), ()), "ended": frozenset({1}), "sampling": GREEDY, "beam_search": BeamSearch(2)},
            "samples",
            "starts at its prompt",
        ),
    ],
)
def test_an_invalid_resumption_is_refused_naming_the_field(
    folder: Path, fields: dict[str, object], field: str, text: str
) -> None:
    engine = ModelEngine(folder, block_size=BLOCK)
    with pytest.raises(InvalidRequest, match=text) as refused:
        engine.take(three(**fields))
    assert refused.value.field == field
    assert engine.scheduler.empty


def test_a_sample_whose_constraint_is_complete_has_ended(folder: Path, constraints: Sequence[Constraint]) -> None:
    engine = ModelEngine(folder, block_size=BLOCK)
    constraint, stopping = constraints[1], Stopping(MOST, frozenset({END}))
    engine.take(three(constraint=constraint, stopping=stopping, samples=((),) * 8))
    engine.run()
    index = next(i for i, member in enumerate(engine.finished["r"].members) if member.stop_token is None)
    assert engine.finished["r"].members[index].finish is FinishReason.STOP
    samples = ((),) * index + (tuple(engine.samples["r"][index]),)
    resumed = three(request_id="s", constraint=constraint, stopping=stopping, samples=(*samples, ()))
    with pytest.raises(InvalidRequest, match="the output is complete, so its sample has ended") as refused:
        engine.take(resumed)
    assert refused.value.field == "samples.generated_token_ids"
    assert engine.scheduler.empty
    engine.take(replace(resumed, ended=frozenset({index})))
    engine.run()


# Order


def test_a_resumed_prompt_is_scored_again_before_tokens_are_generated(folder: Path, alone: list[list[int]]) -> None:
    """EngineInProcess checks the order of each message."""
    engine = ModelEngine(folder, block_size=BLOCK, token_budget=3, max_sequences=3)
    engine.take(three(samples=tuple(tuple(tokens[:4]) for tokens in alone), prompt_logprobs=1))
    engine.run()
    assert [token.token_id for token in engine.scored["r"]] == list(PROMPT[1:])
    assert engine.samples["r"] == [tokens[4:] for tokens in alone]
