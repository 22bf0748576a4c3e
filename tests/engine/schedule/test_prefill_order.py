"""How prompts share the tokens of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.planning.prefill_order import LIMITED_PART, MAX_LIMITED_STEPS, divided
from engine.schedule.step_plan import StepPlan
from simulation.runner import DigestRunner
from tests.engine.watched_scheduler import WatchedScheduler
from tests.engine_in_process import EngineInProcess

BLOCK = 4
BUDGET = 32
FAIR = Limits(token_budget=BUDGET, max_sequences=16, long_prefill_token_threshold=BUDGET)
IN_ORDER = Limits(token_budget=BUDGET, max_sequences=16)


class Rig(EngineInProcess):
    """An engine over a model without tensors."""

    def __init__(self, limits: Limits = FAIR, blocks: int = 1000) -> None:
        capacity = Capacity(2000, 5000, BLOCK, blocks)
        self.watched = WatchedScheduler(capacity, limits)
        self.runner = DigestRunner(capacity)
        super().__init__(self.runner, capacity, scheduler=self.watched)
        self.watched.pool = lambda: self.blocks.pool
        self._prompts = 0

    def submit_prompt(self, tokens: int, max_tokens: int = 1, priority: int = 0) -> str:
        """Submit a prompt that shares no block with others."""
        self._prompts += 1
        return self.submit([self._prompts] * tokens, max_tokens, priority=priority)

    def turns_to_first_token(self, name: str) -> int:
        begun = self.turns
        self.turn_until(lambda: bool(self.tokens[name]))
        return self.turns - begun

    def computed(self, plan: StepPlan) -> list[int]:
        """Tokens that each sequence of a step computes."""
        return [len(work.token_ids) for work in plan.work]


def test_a_short_prompt_does_not_wait_for_the_rest_of_a_long_one() -> None:
    rig = Rig()
    long = rig.submit_prompt(1600)
    rig.turn_times(5)
    assert rig.turns_to_first_token(rig.submit_prompt(8)) <= 3
    assert rig.tokens[long] == []
    rig.run()


def test_a_short_prompt_does_not_wait_for_the_admission_of_long_ones_before_it() -> None:
    rig = Rig()
    longs = [rig.submit_prompt(200) for _ in range(10)]
    rig.turn_times(1)
    short = rig.submit_prompt(8)
    assert rig.turns_to_first_token(short) <= 4
    assert not any(rig.tokens[long] for long in longs[1:])
    rig.run()


def test_a_short_prompt_takes_no_block_that_a_long_one_before_it_needs() -> None:
    rig = Rig(blocks=170)
    first, second, third = (rig.submit_prompt(200) for _ in range(3))
    rig.turn_times(1)
    short = rig.submit_prompt(100)
    rig.turn_until(lambda: short in rig.finished)
    assert {first, second} <= {*rig.finished}, "three long prompts and the short one do not fit"
    rig.run()
    assert third in rig.finished


def test_short_prompts_that_could_fill_all_steps_do_not_starve_a_long_one() -> None:
    rig = Rig()
    long = rig.submit_prompt(20 * BUDGET)
    for _ in range(20 * (MAX_LIMITED_STEPS + 4)):
        if long in rig.finished:
            break
        while rig.scheduler.waiting < 4:
            rig.submit_prompt(BUDGET)
        rig.turn_times(1)
    assert long in rig.finished
    rig.run()


@pytest.mark.parametrize("limits", [FAIR, IN_ORDER])
def test_a_request_that_comes_late_waits_for_its_prefix_no_longer_than_if_it_computed_it(limits: Limits) -> None:
    """Requests reach the engine in another order than the gateway: the later one is computing the prefix already."""
    prefix, turns = [4000] * 160, {}
    for owned in (False, True):
        rig = Rig(limits)
        owner = rig.submit([*prefix, 1] if owned else [3000] * 161, 1)
        rig.turn_times(3)
        rig.submit([2000] * 640, 1, age=20)
        late = rig.submit([*prefix, 2], 1, age=40)
        turns[owned] = rig.turns_to_first_token(late)
        rig.run()
        assert (rig.cached[owner], rig.cached[late]) == (0, len(prefix) if owned else 0)
    assert turns[True] <= turns[False]


def test_without_a_threshold_prompts_are_computed_in_the_order_of_arrival() -> None:
    rig = Rig(IN_ORDER)
    long = rig.submit_prompt(640)
    rig.turn_times(5)
    short = rig.submit_prompt(8)
    rig.turn_until(lambda: bool(rig.tokens[short]))
    assert len(rig.tokens[long]) == 1
    assert rig.scheduler.totals.limited_steps == 0


@pytest.mark.parametrize(("priority", "overtakes"), [(-1, True), (0, True), (1, False)])
def test_a_short_prompt_overtakes_long_ones_of_its_priority_or_a_worse_one(priority: int, overtakes: bool) -> None:
    rig = Rig()
    long = rig.submit_prompt(640)
    rig.turn_times(5)
    short = rig.submit_prompt(8, priority=priority)
    rig.turn_until(lambda: bool(rig.tokens[short]))
    assert (rig.tokens[long] == []) is overtakes
    rig.run()


def test_a_long_prompt_is_never_stopped() -> None:
    rig = Rig()
    long = rig.submit_prompt(1600)
    rig.turn_times(3)
    for _ in range(60):  # short prompts in each step, which leave some tokens of it
        rig.submit_prompt(8)
        rig.turn()
    sequence = rig.runner.plans[0].work[0].sequence
    given_ = [sum(len(work.token_ids) for work in plan.work if work.sequence == sequence) for plan in rig.runner.plans]
    assert min(given_) >= BUDGET // LIMITED_PART
    limited = "".join("l" if tokens <= BUDGET // LIMITED_PART else "-" for tokens in given_)
    assert 0 < max(map(len, limited.split("-"))) <= MAX_LIMITED_STEPS
    rig.run()
    assert len(rig.tokens[long]) == 1


def test_a_long_prompt_receives_whole_steps_while_no_short_one_can_be_admitted() -> None:
    rig = Rig(blocks=420)
    rig.submit_prompt(1600)
    rig.turn_times(3)
    rig.submit_prompt(100)  # has no room beside the long one
    before = len(rig.runner.plans)
    rig.turn_times(10)
    assert [rig.computed(plan) for plan in rig.runner.plans[before:]] == [[BUDGET]] * 10
    rig.run()


def test_a_long_prompt_is_not_limited_up_to_the_blocks_that_others_wait_for() -> None:
    rig = Rig()
    shared = list(range(1, 401))
    rig.submit([*shared, *([7] * 1000)], 1)
    rig.turn_times(2)
    waiting = rig.submit([*shared, 9], 1)
    others = [rig.submit_prompt(8) for _ in range(3)]
    turns = rig.turns_to_first_token(waiting)
    assert turns <= 400 // BUDGET + 4, "it waits no longer than computing these blocks itself would take"
    assert rig.cached[waiting] == 400
    assert all(rig.tokens[one] for one in others)
    rig.run()


def test_long_prompts_share_what_short_ones_leave_in_equal_parts() -> None:
    rig = Rig(Limits(BUDGET, 16, 1024, long_prefill_token_threshold=BUDGET, **parts(3, 2)))
    for _ in range(3):
        rig.submit_prompt(320)
    rig.turn_until(lambda: rig.scheduler.running == 3)
    rig.turn_times(2)
    assert rig.computed(rig.runner.plans[-1]) == [16, 16]
    rig.run()


def test_short_prompts_share_a_step_in_equal_parts() -> None:
    rig = Rig(Limits(BUDGET, 16, 1024, admission_budget=1000, long_prefill_token_threshold=BUDGET, **parts(2, 1)))
    for _ in range(3):
        rig.submit_prompt(24, max_tokens=9)
    rig.turn_until(lambda: bool(rig.runner.plans))
    assert rig.computed(rig.runner.plans[-1]) == [16, 16]
    rig.run()


@pytest.mark.parametrize(("budget", "admitted"), [(0, 2), (1, 1), (1000, 6)])
def test_a_step_admits_requests_up_to_the_admission_budget(budget: int, admitted: int) -> None:
    rig = Rig(Limits(BUDGET, 16, 1024, admission_budget=budget))
    for _ in range(6):
        rig.submit_prompt(24, max_tokens=9)
    rig.turn_until(lambda: rig.scheduler.running > 0)
    assert rig.scheduler.running == admitted
    rig.run()


def parts(partial: int, long: int) -> dict[str, int]:
    """Limits of the prompts that share a step."""
    return {"max_num_partial_prefills": partial, "max_long_partial_prefills": long}


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(0, 60), st.integers(1, 4))
def test_a_budget_is_divided_as_token_by_token(wanted: list[int], budget: int, most: int) -> None:
    given_ = divided(wanted, budget, most)
    assert sum(given_) == min(budget, sum(wanted))
    assert all(0 <= tokens <= most_wanted for tokens, most_wanted in zip(given_, wanted, strict=True))
    partial = [index for index, tokens in enumerate(given_) if 0 < tokens < wanted[index]]
    missing = [index for index, tokens in enumerate(given_) if tokens < wanted[index]]
    assert set(partial) <= set(missing[:most]), "the first that want more share, later ones wait"
    even = [given_[index] for index in missing[:most]]
    assert most == 1 or not even or max(even) - min(even) <= max(wanted)
