"""Steps launched before the previous one has returned its tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.schedule.limits import Preemption
from engine.schedule.request import BeamSearch, Capacity, LogitRules, Request, Sampling, Stopping
from engine.schedule.step_plan import PENDING, Launched, Sampled, StepPlan
from tests.engine.fake_runner import FakeRunner, expected_tokens
from tests.engine_in_process import GREEDY, EngineInProcess, ModelEngine

PROMPT = (0, 1, 1, 0, 1)
VOCABULARY = 50
Tiny = Callable[[str], Path]


@dataclass
class Diary:
    """Records the calls of a runner: ("launch", step), ("result", step)."""

    runner: FakeRunner
    entries: list[tuple[str, int]] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> Launched:
        self.entries.append(("launch", plan.step))
        self.plans.append(plan)
        return _Watched(self, plan.step, self.runner.launch(plan))

    def rows(self, step: int) -> list[tuple[int, ...]]:
        return [work.token_ids for plan in self.plans if plan.step == step for work in plan.work]


@dataclass
class _Watched:
    diary: Diary
    step: int
    launched: Launched

    def result(self) -> list[Sampled]:
        self.diary.entries.append(("result", self.step))
        return self.launched.result()

    def sample_seconds(self) -> float:
        return self.launched.sample_seconds()


@pytest.fixture
def diary() -> Diary:
    return Diary(FakeRunner(4, VOCABULARY))


@pytest.fixture
def engine(diary: Diary) -> EngineInProcess:
    return EngineInProcess(diary, Capacity(64, VOCABULARY, 4, 40), ahead=True)


def test_a_decoding_step_is_launched_before_the_tokens_of_the_previous_one_are_read(
    engine: EngineInProcess, diary: Diary
) -> None:
    name = engine.submit(PROMPT, 6)
    engine.run()
    assert engine.tokens[name] == expected_tokens(PROMPT, 0, 6, frozenset(), VOCABULARY)
    launches = {step: diary.entries.index(("launch", step)) for _, step in diary.entries}
    results = {step: diary.entries.index(("result", step)) for _, step in diary.entries}
    ahead = [step for step in launches if step - 1 in results and launches[step] < results[step - 1]]
    assert ahead == [2, 3, 4, 5, 6]
    assert [diary.rows(step) for step in ahead] == [[(PENDING,)]] * 5


def test_no_step_is_launched_for_a_token_beyond_the_last(engine: EngineInProcess, diary: Diary) -> None:
    engine.submit(PROMPT, 3)
    engine.run()
    assert len(diary.plans) == 3


def test_results_for_a_sequence_that_stopped_are_discarded(engine: EngineInProcess, diary: Diary) -> None:
    whole = expected_tokens(PROMPT, 0, 12, frozenset(), VOCABULARY)
    stop = whole[4]
    name = engine.submit(PROMPT, 12, stop={stop})
    engine.run()
    expected = expected_tokens(PROMPT, 0, 12, frozenset({stop}), VOCABULARY)
    assert engine.tokens[name] == expected
    assert len(diary.plans) == len(expected) + 1, "one step was computed for nothing"
    engine.turn()
    engine.assert_released()


def test_a_request_that_arrives_meanwhile_takes_part_from_the_step_after(engine: EngineInProcess, diary: Diary) -> None:
    names = [engine.submit(PROMPT, 10)]
    while len(engine.tokens[names[0]]) < 4:
        engine.turn()
    names.append(engine.submit((*PROMPT, 1, 1), 6))
    engine.run()
    for name, prompt, count in zip(names, (PROMPT, (*PROMPT, 1, 1)), (10, 6), strict=True):
        assert engine.tokens[name] == expected_tokens(prompt, 0, count, frozenset(), VOCABULARY)
    mixed = [plan for plan in diary.plans if len({len(work.token_ids) for work in plan.work}) > 1]
    assert mixed, "its prompt is computed beside the other's token"


@pytest.mark.parametrize(
    "needs",
    [
        {"logprobs": 1},
        {"logit_rules": LogitRules(frequency_penalty=0.5)},
        {"beam_search": BeamSearch(2)},
    ],
    ids=["log-probabilities", "penalties", "a beam search"],
)
def test_work_that_depends_on_the_last_token_is_not_planned_ahead(needs: dict[str, object], tiny_model: Tiny) -> None:
    found = []
    for ahead in (False, True):
        engine = ModelEngine(tiny_model("llama"), ahead=ahead)
        launched: list[StepPlan] = []
        launch = engine.engine._runner.launch
        engine.engine._runner.launch = lambda plan, to=launched, do=launch: (to.append(plan), do(plan))[1]  # type: ignore[method-assign]
        first = engine.submit(PROMPT, 5, **needs)  # type: ignore[arg-type]
        engine.run()
        found.append(engine.samples[first])
        assert not any(work.token_ids == (PENDING,) for plan in launched for work in plan.work)
    assert found[0] == found[1]


def test_a_failing_step_fails_the_step_launched_behind_it(engine: EngineInProcess, diary: Diary) -> None:
    name = engine.submit(PROMPT, 10)
    while len(engine.tokens[name]) < 3:
        engine.turn()
    diary.runner.fail_next = True
    while name not in engine.finished:
        engine.turn()
    assert len(engine.failures) == 1
    other = engine.submit(PROMPT, 4)
    engine.run()
    assert engine.tokens[other] == expected_tokens(PROMPT, 0, 4, frozenset(), VOCABULARY)


def test_a_model_generates_the_same_tokens_a_step_ahead(tiny_model: Tiny) -> None:
    prompts = [tuple(range(3 + seed, 12 + 3 * seed)) for seed in range(6)]
    found = []
    for ahead in (False, True):
        engine = ModelEngine(
            tiny_model("llama"), block_size=4, device_blocks=60, max_sequences=5, token_budget=8, ahead=ahead
        )
        for number, prompt in enumerate(prompts):
            sampling = GREEDY if number % 2 else Sampling(temperature=1.3, top_p=0.9, seed=number)
            engine.take(Request(f"r{number}", prompt, sampling, Stopping(9 + number), samples=((),) * (1 + number % 3)))
        engine.run()
        found.append(engine.samples)
    assert found[0] == found[1]


@pytest.mark.parametrize("preemption", [Preemption.SWAP, Preemption.RECOMPUTE], ids=lambda way: way.value)
def test_a_model_generates_the_same_tokens_a_step_ahead_of_preemptions(
    tiny_model: Tiny, preemption: Preemption
) -> None:
    prompts = [tuple(range(3 + seed, 14 + 3 * seed)) for seed in range(6)]
    found, preemptions = [], []
    for blocks, ahead in ((200, False), (30, True)):
        engine = ModelEngine(
            tiny_model("llama"), block_size=4, device_blocks=blocks, host_blocks=60, preemption=preemption, ahead=ahead
        )
        for number, prompt in enumerate(prompts):
            engine.submit(prompt, 20 + number)
        engine.run()
        found.append(engine.tokens)
        preemptions.append(engine.scheduler.totals.preemptions)
    assert found[0] == found[1]
    assert preemptions[0] == 0
    assert preemptions[1] > 0
