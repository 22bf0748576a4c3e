"""The runner executes a plan: first copies, then work, with a token for each sampling work."""

from collections.abc import Callable
from pathlib import Path

import pytest

from blocks import Copy
from engine.attention import TorchBackend
from engine.run.runner import ModelRunner
from engine.schedule.step_plan import PENDING_TOKEN, Copies, StepPlan, Work
from tests.engine_in_process import GREEDY, loaded_model
from tests.reference import greedy_reference

BLOCK = 4
PROMPT = (11, 12, 13, 14, 15, 16, 17)

Tiny = Callable[[str], Path]


@pytest.fixture
def backend(tiny_model: Tiny) -> TorchBackend:
    return TorchBackend(loaded_model(tiny_model("llama")).geometry, BLOCK, 8, host_blocks=3)


@pytest.fixture
def runner(tiny_model: Tiny, backend: TorchBackend) -> ModelRunner:
    return ModelRunner(loaded_model(tiny_model("llama")), backend, BLOCK)


def work(token_ids: tuple[int, ...], start: int, table: tuple[int, ...], samples: bool = True) -> Work:
    return Work(1, token_ids, start, table, samples, GREEDY)


def tokens_of(runner: ModelRunner, plan: StepPlan) -> list[int]:
    return [sampled.token_id for sampled in runner.launch(plan).result()]


def test_copies_are_made_before_the_work_reads_them(runner: ModelRunner, tiny_model: Tiny) -> None:
    [expected] = greedy_reference(tiny_model("llama"), [PROMPT], 2)
    assert tokens_of(runner, StepPlan(1, (), (work(PROMPT[:6], 0, (3, 5), samples=False),))) == []
    copies = Copies(device_to_device=(Copy(3, 7), Copy(5, 2)))
    assert tokens_of(runner, StepPlan(2, (copies,), (work(PROMPT[6:], 6, (7, 2)),))) == expected[:1]
    # The source is unchanged, for its other holders.
    assert tokens_of(runner, StepPlan(3, (), (work(PROMPT[6:], 6, (3, 5)),))) == expected[:1]
    assert tokens_of(runner, StepPlan(4, (), (work((expected[0],), 7, (7, 2)),))) == expected[1:]


def test_a_plan_of_copies_only_samples_no_token(runner: ModelRunner, backend: TorchBackend) -> None:
    backend.cache[3] = 5.0
    assert tokens_of(runner, StepPlan(1, (Copies(device_to_device=(Copy(3, 1),)),), ())) == []
    assert (backend.cache[1] == 5.0).all()


def test_the_lists_of_a_result_run_in_order_and_results_are_not_merged(
    runner: ModelRunner, backend: TorchBackend
) -> None:
    for block in range(1, 5):
        backend.cache[block] = float(block)
    first = Copies((Copy(1, 1), Copy(2, 2)), (Copy(2, 1),), (Copy(1, 5), Copy(3, 6)))
    second = Copies((Copy(1, 1), Copy(6, 2)), (Copy(1, 3), Copy(2, 2)), (Copy(3, 4),))
    assert tokens_of(runner, StepPlan(1, (first, second), ())) == []
    assert backend.host_cache is not None
    assert backend.cache[:7, 0].tolist() == [0, 2, 3, 2, 2, 2, 3]
    assert backend.host_cache[:3, 0].tolist() == [0, 2, 3]


def test_tokens_are_in_the_order_of_sampling_work(runner: ModelRunner, tiny_model: Tiny) -> None:
    prompts = [(5,), (6, 7), (8, 9, 10)]
    first, second, third = (tokens[0] for tokens in greedy_reference(tiny_model("llama"), prompts, 1))
    assert len({first, second, third}) == 3
    works = (
        work(prompts[0], 0, (1,)),
        work((1, 2), 0, (4,), samples=False),
        work(prompts[2], 0, (3,)),
        work(prompts[1], 0, (2,)),
    )
    numbered = tuple(one._replace(sequence=number) for number, one in enumerate(works))
    assert tokens_of(runner, StepPlan(1, (), numbered)) == [first, third, second]


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 0)])
def test_pending_tokens_are_those_of_the_step_before_in_any_order(
    runner: ModelRunner, tiny_model: Tiny, order: tuple[int, ...], on_host: bool
) -> None:
    # Without, as on a device that is no CPU; its tensors stay on the CPU.
    runner._pass._on_host = runner._pass._tables[0]._on_host = on_host
    prompts = [(5,), (6, 7), (8, 9, 10)]
    expected = greedy_reference(tiny_model("llama"), prompts, 2)
    works = [Work(number, one, 0, (number + 1,), True, GREEDY) for number, one in enumerate(prompts)]
    ahead = [Work(number, PENDING_TOKEN, len(prompts[number]), (number + 1,), True, GREEDY) for number in order]
    launched = [runner.launch(StepPlan(step, (), tuple(plan))) for step, plan in ((1, works), (2, ahead))]
    found = [[one.token_id for one in step.result()] for step in launched]
    assert found == [[one[0] for one in expected], [expected[number][1] for number in order]]
