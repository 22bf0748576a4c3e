"""Steps launched before the previous one has returned its tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.bad_words import BadWords
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Preemption
from engine.schedule.request import BeamSearch, LogitRules, Sampling
from engine.schedule.step_plan import PENDING, Launched, Sampled, StepPlan
from simulation.runner import DigestRunner, expected_tokens
from tests.engine_in_process import GREEDY, EngineInProcess, ModelEngine

PROMPT = (0, 1, 1, 0, 1)
VOCABULARY = 50
CAPACITY = Capacity(64, VOCABULARY, 4, 40)
Tiny = Callable[[str], Path]


class AnyToken:
    """A constraint that allows the first 320 tokens, and never an end."""

    complete = False

    def start(self) -> "AnyToken":
        return self

    def copy(self) -> "AnyToken":
        return self

    def advance(self, token: int) -> None:
        pass

    def allowed(self) -> bytes:
        return b"\xff" * 40


@dataclass
class RecordingRunner:
    """Records the calls of a runner: ("launch", step), ("result", step)."""

    runner: DigestRunner
    entries: list[tuple[str, int]] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> Launched:
        self.entries.append(("launch", plan.step))
        self.plans.append(plan)
        return _RecordedLaunch(self, plan.step, self.runner.launch(plan))

    def rows(self, step: int) -> list[tuple[int, ...]]:
        return [work.token_ids for plan in self.plans if plan.step == step for work in plan.work]


@dataclass
class _RecordedLaunch:
    recorder: RecordingRunner
    step: int
    launched: Launched

    def result(self) -> list[Sampled]:
        self.recorder.entries.append(("result", self.step))
        return self.launched.result()

    def sample_seconds(self) -> float:
        return self.launched.sample_seconds()


@pytest.fixture
def recorder() -> RecordingRunner:
    return RecordingRunner(DigestRunner(CAPACITY))


@pytest.fixture
def engine(recorder: RecordingRunner) -> EngineInProcess:
    return EngineInProcess(recorder, CAPACITY, ahead=True)


def test_a_decoding_step_is_launched_before_the_tokens_of_the_previous_one_are_read(
    engine: EngineInProcess, recorder: RecordingRunner
) -> None:
    name = engine.submit(PROMPT, 6)
    engine.run()
    assert engine.tokens[name] == expected_tokens(PROMPT, 0, 6, frozenset(), VOCABULARY)
    launches = {step: recorder.entries.index(("launch", step)) for _, step in recorder.entries}
    results = {step: recorder.entries.index(("result", step)) for _, step in recorder.entries}
    ahead = [step for step in launches if step - 1 in results and launches[step] < results[step - 1]]
    assert ahead == [2, 3, 4, 5, 6]
    assert [recorder.rows(step) for step in ahead] == [[(PENDING,)]] * 5


def test_no_step_is_launched_for_a_token_beyond_the_last(engine: EngineInProcess, recorder: RecordingRunner) -> None:
    engine.submit(PROMPT, 3)
    engine.run()
    assert len(recorder.plans) == 3


def test_results_for_a_sequence_that_stopped_are_discarded(engine: EngineInProcess, recorder: RecordingRunner) -> None:
    whole = expected_tokens(PROMPT, 0, 12, frozenset(), VOCABULARY)
    stop = whole[4]
    name = engine.submit(PROMPT, 12, stop={stop})
    engine.run()
    expected = expected_tokens(PROMPT, 0, 12, frozenset({stop}), VOCABULARY)
    assert engine.tokens[name] == expected
    assert len(recorder.plans) == len(expected) + 1, "the result of the last step is discarded"
    engine.turn()
    engine.assert_released()


def test_a_new_request_joins_the_step_after_the_next(engine: EngineInProcess, recorder: RecordingRunner) -> None:
    names = [engine.submit(PROMPT, 10)]
    engine.turn_until(lambda: len(engine.tokens[names[0]]) >= 4)
    names.append(engine.submit((*PROMPT, 1, 1), 6))
    engine.run()
    for name, prompt, count in zip(names, (PROMPT, (*PROMPT, 1, 1)), (10, 6), strict=True):
        assert engine.tokens[name] == expected_tokens(prompt, 0, count, frozenset(), VOCABULARY)
    mixed = [plan for plan in recorder.plans if len({len(work.token_ids) for work in plan.work}) > 1]
    assert mixed, "its prompt is computed beside the other's token"


def test_a_step_planned_ahead_is_dropped_where_the_last_token_bans_another(tiny_model: Tiny) -> None:
    """Without the drop, the token of the step launched ahead would complete the bad word."""
    [free] = ModelEngine(tiny_model("llama")).generate([PROMPT], 12)
    rules = LogitRules(bad_words=BadWords((tuple(free[4:6]),)))
    answers, launches = [], []
    for ahead in (False, True):
        engine = ModelEngine(tiny_model("llama"), ahead=ahead)
        launched = plans_of(engine)
        answers += engine.generate([PROMPT], 12, logit_rules=rules)
        launches.append([work.token_ids == (PENDING,) for plan in launched for work in plan.work])
    assert answers[0] == answers[1] != free
    assert not any(launches[0])
    assert launches[1].count(False) == 2, "the prompt, and the step again that was dropped"
    assert launches[1][:5] == [False, True, True, True, True]


@pytest.mark.parametrize(
    "needs",
    [{"logit_rules": LogitRules(frequency_penalty=0.5)}, {"beam_search": BeamSearch(2)}],
    ids=str,
)
def test_work_that_depends_on_the_last_token_is_not_planned_ahead(needs: dict[str, object], tiny_model: Tiny) -> None:
    samples = []
    for ahead in (False, True):
        engine = ModelEngine(tiny_model("llama"), ahead=ahead)
        launched = plans_of(engine)
        first = engine.submit(PROMPT, 5, **needs)  # type: ignore[arg-type]
        engine.run()
        samples.append(engine.samples[first])
        assert not any(work.token_ids == (PENDING,) for plan in launched for work in plan.work)
    assert samples[0] == samples[1]


def plans_of(engine: ModelEngine) -> list[StepPlan]:
    """Return a list of the plans that the engine launches from now on."""
    launched: list[StepPlan] = []
    launch = engine.engine._runner.launch

    def recording(plan: StepPlan) -> Launched:
        launched.append(plan)
        return launch(plan)

    engine.engine._runner.launch = recording  # type: ignore[method-assign]
    return launched


KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "sampled": {"sampling": Sampling(temperature=1.2, seed=5)},
    "samples": {"sampling": Sampling(temperature=1.2, seed=5), "samples": 2},
    "scored": {"logprobs": 2},
    "scored prompt": {"logprobs": 0, "prompt_logprobs": 1},
    "penalized": {"logit_rules": LogitRules(repetition_penalty=1.5)},
    "beams": {"beam_search": BeamSearch(2)},
}


@hypothesis.settings(max_examples=6)
@given(kinds=st.lists(st.sampled_from(list(KINDS)), min_size=2, max_size=6), budget=st.integers(12, 40))
def test_mixed_requests_get_the_same_tokens_and_scores_a_step_ahead(
    tiny_model: Tiny, kinds: list[str], budget: int
) -> None:
    answers = []
    for ahead in (False, True):
        engine = ModelEngine(tiny_model("llama"), ahead=ahead, max_sequences=12, token_budget=budget)
        for number, kind in enumerate(kinds):
            engine.submit(range(3 + number, 14 + 3 * number), 6 + number, **KINDS[kind])  # type: ignore[arg-type]
        engine.run()
        found = [*engine.scored.values(), *(one for drawn in engine.drawn.values() for one in drawn)]
        answers.append((engine.samples, [one.logprob or 0.0 for scores in found for one in scores]))
    assert answers[0][0] == answers[1][0]
    assert answers[0][1] == pytest.approx(answers[1][1], abs=1e-4)


@pytest.mark.parametrize("kind", ["guided", "penalized", "beams"])
def test_plain_requests_run_ahead_beside_one_that_sits_out_every_other_step(tiny_model: Tiny, kind: str) -> None:
    needs = {**KINDS, "guided": {"constraint": AnyToken()}}[kind]
    engine = ModelEngine(tiny_model("llama"), ahead=True)
    launched = plans_of(engine)
    plain = [engine.submit((*PROMPT, number), 30) for number in range(3)]
    engine.turn_times(4)
    other = engine.submit(PROMPT, 10, **needs)  # type: ignore[arg-type]
    engine.turn_until(lambda: other in engine.finished)
    assert other in engine.finished
    assert not any(name in engine.finished for name in plain)
    first = min(work.sequence for plan in launched for work in plan.work) + 3  # number of the other's first sequence
    steps = [plan.step for plan in launched if any(work.sequence >= first for work in plan.work)]
    assert {later - earlier for earlier, later in pairwise(steps)} == {2}, "it misses every other step, and no more"
    sitting = [plan for plan in launched[5:] if all(work.sequence < first for work in plan.work)]
    assert sitting
    assert all(work.token_ids == (PENDING,) for plan in sitting for work in plan.work), "the others run ahead"
    totals = engine.scheduler.totals
    assert totals.sat_out >= len(sitting) - 1
    assert totals.ahead >= 3 * len(sitting)


def test_no_step_is_planned_ahead_for_fewer_sequences_than_would_sit_out(tiny_model: Tiny) -> None:
    engine = ModelEngine(tiny_model("llama"), ahead=True)
    names = [engine.submit((*PROMPT, number), 8, **KINDS["penalized"]) for number in range(3)]  # type: ignore[arg-type]
    names.append(engine.submit(PROMPT, 8))
    engine.turn_times(6)
    assert [len(engine.tokens[name]) for name in names] == [len(engine.tokens[names[0]])] * 4
    assert engine.scheduler.totals.sat_out == 0


def test_a_failing_step_fails_the_step_launched_behind_it(engine: EngineInProcess, recorder: RecordingRunner) -> None:
    name = engine.submit(PROMPT, 10)
    engine.turn_until(lambda: len(engine.tokens[name]) >= 3)
    recorder.runner.fail_next = True
    engine.turn_until(lambda: name in engine.finished)
    assert len(engine.failures) == 1
    other = engine.submit(PROMPT, 4)
    engine.run()
    assert engine.tokens[other] == expected_tokens(PROMPT, 0, 4, frozenset(), VOCABULARY)


@pytest.mark.parametrize("preemption", [None, Preemption.SWAP, Preemption.RECOMPUTE])
def test_a_model_generates_the_same_tokens_a_step_ahead(tiny_model: Tiny, preemption: Preemption | None) -> None:
    engines = []
    for blocks, ahead in ((200, False), (30 if preemption else 200, True)):
        sizes = {"block_size": 4, "device_blocks": blocks, "host_blocks": 60, "max_sequences": 5, "token_budget": 8}
        way = preemption or Preemption.RECOMPUTE
        engine = ModelEngine(tiny_model("llama"), **sizes, preemption=way, ahead=ahead)  # type: ignore[arg-type]
        for number in range(6):
            sampling = GREEDY if number % 2 else Sampling(temperature=1.3, top_p=0.9, seed=number)
            prompt = range(3 + number, 14 + 3 * number)
            engine.submit(prompt, 20 + number, sampling=sampling, samples=1 + number % 3)
        engine.run()
        engines.append(engine)
    assert engines[0].samples == engines[1].samples
    assert [engine.scheduler.totals.preemptions > 0 for engine in engines] == [False, preemption is not None]
