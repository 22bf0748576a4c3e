"""Beam search gives the answers of transformers, with any chunks, preemptions and other requests."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvmanager
from blocks import FreeReason, Step
from engine.errors import InvalidRequest
from engine.run.continuations import continuations
from engine.schedule.beams import Beams
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
from tests.engine_in_process import GREEDY, ModelEngine
from tests.reference import BeamAnswers, beam_reference
from tests.tiny_models import usual_size

BLOCK = 4
TOLERANCE = 1e-4  # of scores
EOS = 2

Tiny = Callable[[str], Path]


def prompt(length: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 380) for _ in range(length)]


def check(engine: ModelEngine, name: str, expected: BeamAnswers) -> None:
    assert engine.samples[name] == expected.token_ids
    scores = [answer.score for answer in engine.finished[name].answers]
    assert scores == pytest.approx(expected.scores, abs=TOLERANCE)


class TestEqualToTransformers:
    @pytest.mark.parametrize("width", [1, 2, 4, 6])
    @pytest.mark.parametrize("length", [1, 4, 9, 33])
    def test_at_each_width_and_length_of_the_prompt(self, folder: Path, width: int, length: int) -> None:
        engine, search = ModelEngine(folder, block_size=BLOCK), BeamSearch(width)
        name = engine.submit(prompt(length), 20, beam_search=search, samples=width)
        engine.run()
        if width > 1:  # transformers takes one beam for greedy decoding
            check(engine, name, beam_reference(folder, prompt(length), search, 20, width))
        else:
            assert engine.samples[name] == [ModelEngine(folder).generate([prompt(length)], 20)[0]]

    @pytest.mark.parametrize("family", ["gpt2", "opt"])
    def test_in_other_families(self, tiny_model: Tiny, family: str) -> None:
        engine, search = ModelEngine(tiny_model(family), block_size=BLOCK), BeamSearch(4)
        name = engine.submit(prompt(9), 16, beam_search=search, samples=2)
        engine.run()
        check(engine, name, beam_reference(tiny_model(family), prompt(9), search, 16, 2))

    @pytest.mark.parametrize("early_stopping", [False, True])
    @pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
    def test_with_ends_length_penalty_and_early_stopping(
        self, folder: Path, length_penalty: float, early_stopping: bool
    ) -> None:
        search = BeamSearch(4, length_penalty, early_stopping)
        ends = [*range(30, 90)]  # enough of them that some answers end early
        engine = ModelEngine(folder, block_size=BLOCK)
        name = engine.submit(prompt(9), 24, beam_search=search, samples=4, stop=ends)
        engine.run()
        check(engine, name, beam_reference(folder, prompt(9), search, 24, 4, eos_token_id=ends))
        answers = engine.finished[name].answers
        assert length_penalty > 2 or any(answer.stop_token in ends for answer in answers)
        for answer in answers:
            stopped = answer.tokens[-1] in ends
            assert answer.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert answer.stop_token == (answer.tokens[-1] if stopped else None)

    def test_with_bias_penalties_and_min_tokens(self, folder: Path) -> None:
        search, ends = BeamSearch(4), [*range(30, 90)]
        biases = tuple((token, 4.0) for token in prompt(9))
        rules, stopping = LogitRules(1.7, logit_bias=biases), Stopping(20, frozenset(ends), min_tokens=6)
        request = Request(
            "r", tuple(prompt(9)), GREEDY, stopping, samples=((), ()), logit_rules=rules, beam_search=search
        )
        engine = ModelEngine(folder, block_size=BLOCK)
        engine.take(request)
        engine.run()
        rest = {"eos_token_id": ends, "repetition_penalty": 1.7, "min_new_tokens": 6}
        rest["sequence_bias"] = [[[token], bias] for token, bias in biases]
        check(engine, "r", beam_reference(folder, prompt(9), search, 20, 2, **rest))

    @pytest.mark.parametrize("budget", [6, 7, 13])
    def test_in_small_chunks_beside_others(self, folder: Path, budget: int) -> None:
        engine = ModelEngine(folder, block_size=BLOCK, token_budget=budget, max_sequences=min(12, budget))
        for seed in (2, 3):
            engine.submit(prompt(7, seed), 12, sampling=Sampling(seed=seed), samples=2)
        search = BeamSearch(4)
        name = engine.submit(prompt(20), 12, beam_search=search, samples=4)
        engine.run()
        check(engine, name, beam_reference(folder, prompt(20), search, 12, 4))

    @usual_size
    @pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
    @pytest.mark.parametrize("budget", [5, 64])
    @pytest.mark.parametrize("head_start", range(0, 30, 9))
    def test_after_preemptions_of_each_kind(
        self, folder: Path, preemption: Preemption, budget: int, head_start: int
    ) -> None:
        sizes = {"block_size": BLOCK, "device_blocks": 18, "host_blocks": 30, "max_sequences": 5}
        engine = ModelEngine(folder, **sizes, token_budget=budget, preemption=preemption)  # type: ignore[arg-type]
        engine.submit(prompt(4, 5), 64, priority=-1)  # it grows until it needs nearly all blocks
        engine.turn_times(head_start)
        search = BeamSearch(4)
        name = engine.submit(prompt(10), 12, beam_search=search, samples=4)
        engine.run()
        group = engine.finished[name]
        check(engine, name, beam_reference(folder, prompt(10), search, 12, 4))
        assert group.stats.preemptions >= 1
        if preemption is Preemption.SWAP:
            assert (group.stats.recomputed_tokens, group.stats.swapped_tokens > 0) == (0, True)
        else:
            assert (group.stats.recomputed_tokens > 0, group.stats.swapped_tokens) == (True, 0)


class TestBlocks:
    def test_beams_fork_and_free_at_every_step_and_share_common_blocks(self, folder: Path) -> None:
        seen: list[tuple[Step, kvmanager.AppliedStep]] = []
        engine = ModelEngine(folder, block_size=BLOCK, observe=lambda *step: seen.append(step))
        engine.submit(prompt(10), 20, beam_search=BeamSearch(4))
        sequences, shared = 0, 0
        while not engine.scheduler.empty:
            engine.turn()
            tables = [one.table for one in engine.blocks.pool.sequences.values()]
            sequences = max(sequences, len(tables))
            held = {block for table in tables for block in table}
            shared = max(shared, sum(map(len, tables)) - len(held))
        forks = [fork for step, _ in seen for fork in step.forks]
        pruned = [free for step, _ in seen for free in step.frees if free.reason is FreeReason.PRUNED]
        assert len(forks) > 4
        assert len(forks) == len(pruned) + 3, "one beam at the beginning, four at the end"
        assert sequences == 4
        assert shared >= 3 * (10 // BLOCK)
        engine.assert_released()

    def test_the_prompt_is_computed_once(self, folder: Path) -> None:
        engine = ModelEngine(folder, block_size=BLOCK)
        engine.submit(prompt(10), 6, beam_search=BeamSearch(4))
        engine.run()
        assert engine.scheduler.totals.computed_tokens == 10 + 4 * 5


class TestEnds:
    def test_a_cancelled_search_releases_its_blocks_and_has_no_answers(self, folder: Path) -> None:
        for turns in range(12):
            engine = ModelEngine(folder, block_size=BLOCK)
            name = engine.submit(prompt(10), 20, beam_search=BeamSearch(4), samples=3)
            engine.turn_times(turns)
            engine.scheduler.requests.cancel(name)
            engine.run()
            engine.turn()
            answers = engine.finished[name].answers
            assert [(one.finish, one.generated, one.score) for one in answers] == 3 * [
                (FinishReason.CANCELLED, 0, None)
            ]

    def test_an_expired_search_fails(self, folder: Path) -> None:
        engine = ModelEngine(folder, block_size=BLOCK)
        name = engine.submit(prompt(10), 20, beam_search=BeamSearch(4), deadline=6.0)
        engine.run()
        group = engine.finished[name]
        assert (group.failure, [one.finish for one in group.answers]) == (Failure.DEADLINE, [FinishReason.FAILED])

    def test_missing_answers_are_empty(self, folder: Path) -> None:
        engine, rules = ModelEngine(folder, block_size=BLOCK), LogitRules(allowed_token_ids=(7,))
        name = engine.submit(prompt(5), 2, samples=3, beam_search=BeamSearch(3), logit_rules=rules)
        engine.run()
        assert engine.samples[name] == [[7, 7], [], []]
        assert [answer.score is None for answer in engine.finished[name].answers] == [False, True, True]


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"beam_search": BeamSearch(9)}, "beam_search.width"),
            ({"beam_search": BeamSearch(8), "stopping": Stopping(4, frozenset(range(600)))}, "stopping.stop_token_ids"),
            ({"samples": ((),) * 3}, "sampling.sample_count"),
            ({"samples": ((5,),)}, "samples"),
            ({"stopping": Stopping(40)}, "stopping.max_tokens"),
        ],
    )
    def test_an_invalid_search_is_refused_naming_the_field(
        self, folder: Path, change: dict[str, Any], field: str
    ) -> None:
        request = Request("r", tuple(prompt(5)), GREEDY, Stopping(4), beam_search=BeamSearch(2))
        engine = ModelEngine(folder, block_size=BLOCK, device_blocks=20, max_sequences=8)
        with pytest.raises(InvalidRequest) as caught:
            engine.take(replace(request, **change))
        assert caught.value.field == field
        assert engine.scheduler.empty


class TestContinuations:
    LOGITS = torch.randn((40, 500), generator=torch.Generator().manual_seed(3)) * 4

    def test_continuations_are_the_most_likely_tokens(self) -> None:
        expected = self.LOGITS.double().log_softmax(-1)
        for number, one in enumerate(continuations(self.LOGITS, [None] * 40, [6] * 40)):
            values, token_ids = expected[number].topk(6)
            assert [token for token, _ in one.top] == token_ids.tolist()
            assert [logprob for _, logprob in one.top] == pytest.approx(values.tolist(), abs=1e-5)

    def test_continuations_exclude_banned_tokens(self) -> None:
        rules = RowRules(LogitRules(allowed_token_ids=(3, 4)), banned_token_ids=frozenset({4}))
        [one] = continuations(self.LOGITS[:1], [rules], [6])
        assert [token for token, _ in one.top] == [3]

    def test_continuations_of_a_row_do_not_depend_on_other_rows(self) -> None:
        logits = self.LOGITS.round()  # with ties
        together = continuations(logits, [None] * 40, [4 + number % 9 for number in range(40)])
        for number in range(40):
            assert continuations(logits[number : number + 1], [None], [4 + number % 9]) == [together[number]]


class TestSearch:
    def test_the_first_beam_is_the_most_likely_and_ties_go_to_the_smaller_token(self) -> None:
        beams = Beams(BeamSearch(2), Stopping(5))
        kept = beams.advance([[]], [[(7, -1.0), (3, -1.0), (9, -0.5)]])
        assert [(one.parent, one.token_id, one.logprob) for one in kept] == [(0, 9, -0.5), (0, 3, -1.0)]

    def test_an_end_that_is_not_among_the_best_is_no_answer(self) -> None:
        beams = Beams(BeamSearch(2), Stopping(5, frozenset({EOS})))
        beams.advance([[]], [[(7, -0.1), (3, -0.2), (EOS, -0.3)]])
        assert not beams.answers
        beams.advance([[7], [3]], [[(EOS, -0.1), (5, -0.3)], [(6, -4.0)]])
        assert [(answer.token_ids, answer.stop_token) for answer in beams.answers] == [((7, EOS), EOS)]

    @pytest.mark.parametrize("length", [1, 2, 3, 4097, 2**31])
    @pytest.mark.parametrize("length_penalty", [-10.0, -5e-324, 0.0, 0.7, 10.0])
    def test_scores_keep_the_order_of_log_probabilities_at_every_length(
        self, length: int, length_penalty: float
    ) -> None:
        logprobs = [-1e30, -1e9, -40.0, math.nextafter(-40.0, 0), -1.0, -1e-38, 0.0, 1e-38, 1.0, 1e9]
        beams = Beams(BeamSearch(1, length_penalty), Stopping(5))
        scores = [beams._score(logprob, length) for logprob in logprobs]
        assert all(map(math.isfinite, scores))
        assert [math.copysign(score != 0, score) for score in scores] == [
            math.copysign(logprob != 0, logprob) for logprob in logprobs
        ]
        assert scores == sorted(scores)
        assert len(set(scores[:2] + scores[4:])) == 8, "distinct log-probabilities have distinct scores"

    def test_nothing_likelier_can_come_once_all_answers_are_better_than_the_best_beam(self) -> None:
        beams = Beams(BeamSearch(1, length_penalty=0.0), Stopping(9, frozenset({EOS})))
        beams.advance([[]], [[(EOS, -0.5), (7, -0.9)]])
        assert beams.done
        assert [answer.score for answer in beams.answers] == [-0.5]
