"""Log-probabilities of generated tokens and prompts equal those of transformers."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine.run.logprobs import score
from engine.run.runner import outcomes
from engine.schedule.limits import Preemption
from engine.schedule.request import FinishReason, LogitRules, Sampling
from engine.schedule.step_plan import PromptPart, RowRules, Sampled, Work
from tests.engine_in_process import GREEDY, ModelEngine
from tests.reference import reference_logprobs
from tests.tiny_models import CONTEXT

TOLERANCE = 1e-4
PROMPT = tuple(range(40, 77))

Tiny = Callable[[str], Path]


def check(folder: Path, tokens: Sequence[int], scored: Sequence[Sampled], first: int, count: int) -> None:
    """Compare the log-probabilities of the tokens from index `first` on with the reference."""
    reference = reference_logprobs(folder, tokens)[first - 1 :]
    assert [one.token_id for one in scored] == list(tokens[first:])
    for row, one in zip(reference, scored, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=TOLERANCE)
        assert [logprob for _, logprob in one.top] == pytest.approx(row.topk(count).values.tolist(), abs=TOLERANCE)
        assert [logprob for _, logprob in one.top] == pytest.approx([float(row[i]) for i, _ in one.top], abs=TOLERANCE)


class TestScore:
    LOGITS = torch.randn((300, 500), generator=torch.Generator().manual_seed(3)) * 4

    def test_is_the_log_softmax_and_the_most_likely_first(self) -> None:
        tokens = list(range(300))
        rows = score(self.LOGITS, tokens, [5] * 300)
        expected = self.LOGITS.double().log_softmax(-1)
        for number, row in enumerate(rows):
            assert row.logprob == pytest.approx(float(expected[number, number]), abs=1e-5)
            assert [token for token, _ in row.top] == self.LOGITS[number].topk(5).indices.tolist()

    def test_of_equal_candidates_the_smaller_id_comes_first(self) -> None:
        [row] = score(torch.tensor([[0.0, 1.0, 5.0, 5.0, 1.0]]), [4], [4])
        assert [token for token, _ in row.top] == [2, 3, 1, 4]

    def test_a_request_for_more_candidates_than_the_vocabulary_returns_all(self) -> None:
        [row] = score(torch.zeros((1, 3)), [1], [20])
        assert [token for token, _ in row.top] == [0, 1, 2]
        assert row.logprob == pytest.approx(math.log(1 / 3))

    @pytest.mark.parametrize("count", [0, 1, 20])
    def test_a_row_is_bit_for_bit_the_same_alone_and_among_64(self, count: int) -> None:
        logits = self.LOGITS[:64].round()  # with ties
        together = score(logits, [7] * 64, [number % 21 for number in range(63)] + [count])
        assert score(logits[63:], [7], [count]) == together[63:]


def test_results_are_in_the_order_of_the_work() -> None:
    logits = torch.full((7, 10), -9.0)
    for row, token in enumerate((9, 8, 3, 4, 4, 4, 6)):
        logits[row, token] = 9.0
    works = (
        Work(1, (0,) * 4, 0, (1,), True, GREEDY, logprobs=1, to_score=PromptPart(1, (9, 1, 3), 0)),
        Work(2, (0,), 9, (2,), True, GREEDY, (0, 1), RowRules(LogitRules(logit_bias=((4, -99.0), (2, 9.0))))),
        Work(3, (0,) * 3, 0, (3,), False, GREEDY, (), to_score=PromptPart(2, (5,), 2)),
    )
    results = outcomes(logits, works)
    assert [one.token_id for one in results] == [9, 1, 3, 4, 2, 2, 5]
    assert [one.logprob is None for one in results] == [False] * 4 + [True] * 2 + [False]
    assert [len(one.top) for one in results] == [0, 0, 0, 1, 0, 0, 2]


class TestGenerated:
    @pytest.mark.parametrize("count", [0, 20])
    def test_are_those_of_the_model_before_rules_temperature_and_filters(self, tiny_model: Tiny, count: int) -> None:
        engine = ModelEngine(tiny_model("llama"))
        sampling, rules = Sampling(2.0, top_k=50, seed=4), LogitRules(1.5, 0.3, logit_bias=((7, 3.0),))
        name = engine.submit(PROMPT, 20, sampling=sampling, logit_rules=rules, logprobs=count)
        engine.run()
        check(engine.folder, [*PROMPT, *engine.tokens[name]], engine.sampled[name], len(PROMPT), count)

    def test_do_not_change_the_chosen_tokens(self, tiny_model: Tiny) -> None:
        answers = []
        for count in (None, 3):
            engine = ModelEngine(tiny_model("llama"))
            answers.append(engine.generate([PROMPT] * 2, 20, sampling=Sampling(seed=4), logprobs=count))
        assert answers[0] == answers[1]

    def test_only_requests_with_logprobs_get_them(self, tiny_model: Tiny) -> None:
        engine = ModelEngine(tiny_model("llama"))
        scored, other = engine.submit(PROMPT, 5, logprobs=2), engine.submit(PROMPT[1:], 5)
        engine.run()
        assert all(len(one.top) == 2 for one in engine.sampled[scored])
        assert all(one == Sampled(one.token_id) for one in engine.sampled[other])

    def test_are_bitwise_equal_in_an_equal_batch_and_close_in_another(self, tiny_model: Tiny) -> None:
        """Rounding depends on the shape of the batch."""

        def sampled(companions: int) -> list[Sampled]:
            engine = ModelEngine(tiny_model("llama"))
            own = engine.submit(PROMPT, 40, logprobs=3)
            for number in range(companions):
                engine.submit(PROMPT[number + 1 :], 10 + 3 * number)
            engine.run()
            return engine.sampled[own]

        alone, batched = sampled(0), sampled(9)
        assert sampled(0) == alone
        assert sampled(9) == batched
        assert [one.token_id for one in batched] == [one.token_id for one in alone]
        assert [one.logprob for one in batched] == pytest.approx([one.logprob for one in alone], abs=TOLERANCE)


class TestPrompts:
    @pytest.mark.parametrize(("token_budget", "count"), [(1, 4), (5, 0), (16, 4), (512, 0)])
    def test_are_scored_at_any_budget(self, tiny_model: Tiny, token_budget: int, count: int) -> None:
        engine = ModelEngine(tiny_model("llama"), token_budget=token_budget)
        name = engine.submit(PROMPT, 3, prompt_logprobs=count)
        engine.run()
        check(engine.folder, PROMPT, engine.scored[name], 1, count)

    @pytest.mark.parametrize("kind", ["llama", "gpt2", "windowed"])
    def test_of_a_whole_context_are_scored_if_nothing_is_generated(self, tiny_model: Tiny, kind: str) -> None:
        engine = ModelEngine(tiny_model(kind), kinds=kind == "windowed")
        tokens = [40 + 7 * number % 300 for number in range(CONTEXT)]
        name = engine.submit(tokens, 0, prompt_logprobs=1)
        engine.run()
        check(engine.folder, tokens, engine.scored[name], 1, 1)
        assert engine.finished[name].finish is FinishReason.LENGTH

    def test_of_one_token_have_none(self, tiny_model: Tiny) -> None:
        engine = ModelEngine(tiny_model("llama"))
        name = engine.submit([9], 3, prompt_logprobs=4)
        engine.run()
        assert (engine.scored[name], len(engine.tokens[name])) == ([], 3)

    def test_are_scored_even_if_they_are_cached(self, tiny_model: Tiny) -> None:
        engine = ModelEngine(tiny_model("llama"), block_size=4, token_budget=16)
        engine.generate([PROMPT], 3)
        names = [engine.submit(PROMPT, 3, prompt_logprobs=2) for _ in range(3)]
        engine.run()
        for name in names:
            assert engine.cached[name] == 0
            check(engine.folder, PROMPT, engine.scored[name], 1, 2)

    def test_are_computed_with_an_equal_prompt_without_affecting_it(self, tiny_model: Tiny) -> None:
        engine = ModelEngine(tiny_model("llama"), block_size=4, token_budget=16)
        plain, scored = engine.submit(PROMPT, 3), engine.submit(PROMPT, 3, prompt_logprobs=2)
        second = engine.submit(PROMPT, 3)
        engine.run()
        check(engine.folder, PROMPT, engine.scored[scored], 1, 2)
        assert [engine.cached[name] for name in (plain, scored, second)] == [0, 0, 36]
        assert engine.tokens[plain] == engine.tokens[scored] == engine.tokens[second]

    def test_are_scored_once_for_all_samples(self, tiny_model: Tiny) -> None:
        engine = ModelEngine(tiny_model("llama"), token_budget=16, max_sequences=4)
        name = engine.submit(PROMPT, 6, sampling=Sampling(seed=3), samples=3, prompt_logprobs=2, logprobs=2)
        engine.run()
        check(engine.folder, PROMPT, engine.scored[name], 1, 2)
        check(engine.folder, [*PROMPT, *engine.tokens[name]], engine.sampled[name], len(PROMPT), 2)

    @pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
    def test_are_scored_once_even_if_preempted_halfway(self, tiny_model: Tiny, preemption: Preemption) -> None:
        folder, pool = tiny_model("llama"), {"block_size": 4, "device_blocks": 12, "host_blocks": 24}
        engine = ModelEngine(folder, token_budget=4, max_sequences=4, preemption=preemption, **pool)
        # The urgent answer grows into the blocks of the other prompt, which computes three tokens a step.
        urgent = engine.submit(PROMPT[:2], 30, prompt_logprobs=1)
        victim = engine.submit(PROMPT, 3, priority=1, prompt_logprobs=2)
        while not engine.scheduler.totals.preemptions:
            engine.turn()
        assert 10 < len(engine.scored[victim]) < len(PROMPT) - 1
        engine.run()
        check(folder, PROMPT, engine.scored[victim], 1, 2)
        check(folder, PROMPT[:2], engine.scored[urgent], 1, 1)
