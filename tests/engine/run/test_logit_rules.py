"""Logit rules: equal to transformers' processors, in order, and independent of other rows."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.errors import InvalidRequest
from engine.run.logit_rules import apply_rules
from engine.run.sampling import Draw, sample
from engine.schedule.capacity import Capacity
from engine.schedule.request import NO_RULES, FinishReason, LogitRules, Request, Sampling, Stopping
from engine.schedule.sequence_group import Group
from engine.schedule.step_plan import RowRules
from tests.engine.run.chi_square import chi_square_is_likely
from tests.engine_in_process import GREEDY, ModelEngine

VOCABULARY = 200
PROMPT = (3, 7, 7, 11, 199)
OUTPUT = (7, 0, 0, 0, 42)

Tiny = Callable[[str], Path]


@pytest.fixture
def logits() -> torch.Tensor:
    numbers = torch.randn((4, VOCABULARY), generator=torch.Generator().manual_seed(5)) * 3
    numbers[:, 7] = torch.tensor([-2.0, 2.0, 0.0, -math.inf])
    return numbers


def applied(logits: torch.Tensor, rules: LogitRules = NO_RULES, banned: Sequence[int] = ()) -> torch.Tensor:
    return apply_rules(logits, [RowRules(rules, PROMPT, OUTPUT, frozenset(banned))] * len(logits))


class TestAgainstTransformers:
    def input_ids(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[*PROMPT, *OUTPUT]] * len(logits))

    @pytest.mark.parametrize("penalty", [0.3, 0.999, 1.1, 1.7, 50.0])
    def test_the_repetition_penalty_equals_that_of_transformers(self, logits: torch.Tensor, penalty: float) -> None:
        expected = RepetitionPenaltyLogitsProcessor(penalty)(self.input_ids(logits), logits.clone())
        assert torch.equal(applied(logits, LogitRules(repetition_penalty=penalty)), expected)

    def test_the_bias_equals_that_of_transformers(self, logits: torch.Tensor) -> None:
        biases = ((0, 1.5), (7, -100.0), (199, 0.1))
        processor = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases])
        expected = processor(self.input_ids(logits), logits.clone())
        assert torch.equal(applied(logits, LogitRules(logit_bias=biases)), expected)

    def test_banned_tokens_equal_those_that_transformers_suppresses(self, logits: torch.Tensor) -> None:
        allowed = (0, 5, 7, 199)
        others = [token for token in range(VOCABULARY) if token not in allowed]
        expected = SuppressTokensLogitsProcessor(others)(self.input_ids(logits), logits.clone())
        assert torch.equal(applied(logits, LogitRules(allowed_token_ids=allowed)), expected)

    @pytest.mark.parametrize("min_tokens", [0, 5, 6, 20])
    def test_min_tokens_ban_the_same_tokens_as_in_transformers(self, logits: torch.Tensor, min_tokens: int) -> None:
        processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, [0, 9])
        expected = processor(self.input_ids(logits), logits.clone())
        request = Request("r", PROMPT, GREEDY, Stopping(30, frozenset({0, 9}), min_tokens))
        [sequence] = Group.of(replace(request, samples=(OUTPUT,)), count(1)).members
        rules = sequence.rules_at(len(sequence.tokens))
        assert (rules is None) == (min_tokens <= len(OUTPUT))
        assert torch.equal(apply_rules(logits, [rules] * len(logits)), expected)

    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(1.3, top_k=6, seed=1),
            Sampling(0.9, top_p=0.8, seed=2),
            Sampling(1.5, min_p=0.1, seed=3),
            Sampling(1.2, top_k=12, top_p=0.9, min_p=0.05, seed=4),
        ],
    )
    def test_2000_draws_after_rules_have_the_distribution_of_transformers(
        self, logits: torch.Tensor, sampling: Sampling
    ) -> None:
        rules = LogitRules(repetition_penalty=1.4, logit_bias=((0, 4.0), (7, -1.0)))
        biases = [[[token], bias] for token, bias in rules.logit_bias]
        processors = LogitsProcessorList([SequenceBiasLogitsProcessor(biases)])
        processors.append(RepetitionPenaltyLogitsProcessor(1.4))
        processors.append(TemperatureLogitsWarper(sampling.temperature))
        processors.append(MinPLogitsWarper(sampling.min_p))
        processors.append(TopKLogitsWarper(sampling.top_k or VOCABULARY))
        processors.append(TopPLogitsWarper(sampling.top_p))
        chances = processors(self.input_ids(logits[:1]), logits[:1].clone()).softmax(-1)[0]
        row = RowRules(rules, PROMPT, OUTPUT)
        draws = [Draw(sampling, 0, position, row) for position in range(2000)]
        chosen = sample(logits[:1].expand(2000, -1), draws)
        assert chi_square_is_likely(Counter(chosen), chances.tolist())


class TestEachRule:
    def test_presence_counts_a_token_once(self, logits: torch.Tensor) -> None:
        changed = applied(logits, LogitRules(presence_penalty=0.7))
        expected = logits.clone()
        expected[:, [0, 7, 42]] -= 0.7
        assert torch.equal(changed, expected)

    def test_frequency_counts_each_occurrence(self, logits: torch.Tensor) -> None:
        changed = applied(logits, LogitRules(frequency_penalty=-0.5))
        expected = logits.clone()
        expected[:, [0, 7, 42]] += torch.tensor([1.5, 0.5, 0.5])
        assert torch.equal(changed, expected)

    def test_rules_apply_in_order(self, logits: torch.Tensor) -> None:
        rules = LogitRules(2.0, 0.5, 0.25, ((0, 3.0), (1, 1.0)), (0, 7, 9))
        expected = torch.full_like(logits, -math.inf)
        for row, numbers in enumerate(logits.tolist()):
            zero, seven = (number / 2 if number > 0 else number * 2 for number in (numbers[0] + 3.0, numbers[7]))
            expected[row, [0, 7]] = torch.tensor([zero - 3 * 0.5 - 0.25, seven - 0.5 - 0.25])
        changed = applied(logits, rules, banned=[9])
        assert torch.equal(changed.isinf(), expected.isinf())
        assert changed.nan_to_num() == pytest.approx(expected.nan_to_num(), abs=1e-5)

    def test_a_penalty_scales_a_bias_too_as_in_vllms_example(self) -> None:
        """Token 0 is in the prompt: (2 + 3) / 1.5 is below token 1's 4, but 2 / 1.5 + 3 would be above."""
        row = RowRules(LogitRules(repetition_penalty=1.5, logit_bias=((0, 3.0),)), prompt=(0,))
        logits = torch.tensor([[2.0, 4.0]])
        assert apply_rules(logits, [row]).tolist() == [[pytest.approx(5 / 1.5), 4.0]]
        assert sample(logits, [Draw(GREEDY, 0, 0, row)]) == [1]

    def test_no_bias_allows_a_banned_token(self) -> None:
        rules = LogitRules(repetition_penalty=0.5, logit_bias=tuple((token, 1e9) for token in range(4)))
        row = RowRules(rules, (0, 1, 2), banned_token_ids=frozenset({0}), mask=bytes([0b1011]))
        assert apply_rules(torch.ones(1, 4), [row]).isinf().tolist() == [[True, False, True, False]]

    def test_the_input_logits_are_not_modified(self, logits: torch.Tensor) -> None:
        before = logits.clone()
        applied(logits, LogitRules(2.0, 0.5, 0.25, ((0, 3.0),), (0, 7, 9)), banned=[7])
        assert torch.equal(logits, before)

    def test_no_rule_changes_nothing(self, logits: torch.Tensor) -> None:
        assert torch.equal(apply_rules(logits, [None] * 4), logits)
        assert torch.equal(applied(logits), logits)

    @pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
    def test_extreme_numbers_sample_like_moderate_ones(self, temperature: float) -> None:
        logits = torch.tensor([[1.0, 2.0, 3.0, -1.0]])
        cases = {
            LogitRules(logit_bias=((0, 1e300), (1, -1e300))): 0,
            LogitRules(logit_bias=((3, 1e300), (0, 1e300))): 0,
            LogitRules(repetition_penalty=5e-324): 2,
            LogitRules(repetition_penalty=1e300, allowed_token_ids=(1, 3)): 1,
            LogitRules(frequency_penalty=1e300): 1,
            LogitRules(presence_penalty=-1e300): 2,
        }
        for rules, expected in cases.items():
            draw = Draw(Sampling(temperature, top_k=1, seed=4), 0, 9, RowRules(rules, (2, 3), (2, 2)))
            assert sample(logits, [draw]) == [expected], rules


class TestBatches:
    def random_row(self, source: random.Random) -> tuple[Draw, torch.Tensor]:
        rules = LogitRules(
            source.choice([1.0, 1.3]),
            source.choice([0.0, 0.2]),
            source.choice([0.0, -0.3]),
            source.choice([(), ((source.randrange(VOCABULARY), 2.0),)]),
            source.choice([(), tuple(source.sample(range(VOCABULARY), 50))]),
        )
        tokens = [tuple(source.choices(range(VOCABULARY), k=source.randrange(30))) for _ in range(2)]
        row = source.choice([None, RowRules(rules, *tokens, frozenset(source.sample(range(VOCABULARY), 2)))])
        sampling = Sampling(source.choice([0.0, 0.8]), source.choice([0, 9]), source.choice([1.0, 0.8]), seed=3)
        numbers = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(source.randrange(2**40)))
        return Draw(sampling, 0, source.randrange(1000), row), numbers

    @pytest.mark.parametrize("seed", range(3))
    def test_a_row_is_bit_for_bit_the_same_alone_and_among_64(self, seed: int) -> None:
        source = random.Random(seed)
        rows = [self.random_row(source) for _ in range(64)]
        draws, logits = [draw for draw, _ in rows], torch.stack([numbers for _, numbers in rows])
        together = apply_rules(logits, [draw.rules for draw in draws])
        chosen = sample(logits, draws)
        for number, draw in enumerate(draws):
            own = logits[number : number + 1]
            assert torch.equal(apply_rules(own, [draw.rules])[0], together[number])
            assert sample(own, [draw]) == [chosen[number]]


class TestEngine:
    PROMPT = (50, 60, 70, 80, 50, 60)

    def test_a_resumed_request_has_the_same_penalties(self, tiny_model: Tiny) -> None:
        engine = ModelEngine(tiny_model("llama"))
        common = (Sampling(0.8, seed=9), Stopping(20, frozenset({11}), 15))
        rules = LogitRules(1.2, 0.4, 0.3)
        engine.take(Request("whole", self.PROMPT, *common, logit_rules=rules))
        engine.run()
        whole = engine.tokens["whole"]
        for done in (1, 10, 14):
            moved = Request(f"moved {done}", self.PROMPT, *common, samples=(tuple(whole[:done]),), logit_rules=rules)
            engine.take(moved)
            engine.run()
            assert whole[:done] + engine.tokens[moved.request_id] == whole

    def test_each_sample_counts_its_own_output(self, tiny_model: Tiny) -> None:
        engine = ModelEngine(tiny_model("llama"))
        rules = LogitRules(presence_penalty=1e9)
        name = engine.submit(self.PROMPT, 30, sampling=Sampling(seed=2), logit_rules=rules, samples=3)
        engine.run()
        assert [len(set(sample)) for sample in engine.samples[name]] == [30] * 3
        assert set.intersection(*map(set, engine.samples[name]))

    @pytest.mark.parametrize("ignored", [False, True])
    def test_no_end_token_is_chosen_before_min_tokens(self, tiny_model: Tiny, ignored: bool) -> None:
        engine = ModelEngine(tiny_model("llama"))
        ends = frozenset({5, 6})
        stopping = Stopping(30, frozenset() if ignored else ends, 12, ends if ignored else frozenset())
        rules = LogitRules(logit_bias=((5, 1e9),))  # chosen as soon as possible
        engine.take(Request("r", self.PROMPT, GREEDY, stopping, logit_rules=rules))
        engine.run()
        answer = engine.tokens["r"]
        assert answer.index(5) == 12
        assert 6 not in answer[:12]
        assert engine.finished["r"].finish == (FinishReason.LENGTH if ignored else FinishReason.STOP)


BAD = [
    (LogitRules(logit_bias=((200, 1.0),)), "logit_rules.logit_bias", "200"),
    (LogitRules(allowed_token_ids=(1, -1)), "logit_rules.allowed_token_ids", "-1"),
    (LogitRules(allowed_token_ids=(1, 2)), "logit_rules.allowed_token_ids", "no token to choose"),
]


@pytest.mark.parametrize(("rules", "field", "reason"), BAD)
def test_impossible_rules_are_refused(rules: LogitRules, field: str, reason: str) -> None:
    request = Request("r", PROMPT, GREEDY, Stopping(9, frozenset({1, 2, 3}), 1), logit_rules=rules)
    with pytest.raises(InvalidRequest) as refused:
        Capacity(100, VOCABULARY, 16, 16).check(request)
    assert refused.value.field == field
    assert str(refused.value).startswith(field)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "stopping",
    [Stopping(9, min_tokens=10), Stopping(9, min_tokens=-1), Stopping(9, frozenset(range(VOCABULARY)), 1)],
    ids=["above max_tokens", "negative", "all tokens end"],
)
def test_impossible_min_tokens_are_refused(stopping: Stopping) -> None:
    with pytest.raises(InvalidRequest, match=r"^stopping.min_tokens (must be between|leaves no token)") as refused:
        Capacity(100, VOCABULARY, 16, 16).check(Request("r", PROMPT, GREEDY, stopping))
    assert refused.value.field == "stopping.min_tokens"
