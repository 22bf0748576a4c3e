"""Isolated requests are alone in their batches until they gain a token, and delay others for a limited time."""

from itertools import pairwise

import pytest

from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.outputs import Started
from engine.schedule.request import BeamSearch, Sampling
from engine.schedule.step_plan import StepPlan
from simulation.runner import DigestRunner, expected_answers, expected_tokens
from tests.engine.watched_scheduler import WatchedScheduler
from tests.engine_in_process import GREEDY, EngineInProcess

VOCABULARY = 50
BUDGET = 8
LONG_PROMPT = tuple(range(1, 21))  # three steps of the budget


class Rig(EngineInProcess):
    """An engine over a fake model. The seed of a request, which is its number, identifies it in plans."""

    def __init__(self, isolation_turns: float = 1000.0, *, ahead: bool = False, device_blocks: int = 60) -> None:
        capacity = Capacity(64, VOCABULARY, 4, device_blocks)
        limits = Limits(BUDGET, 8, isolation_seconds=isolation_turns)
        self.watched = WatchedScheduler(capacity, limits, ahead=ahead)
        self.runner = DigestRunner(capacity)
        super().__init__(self.runner, capacity, scheduler=self.watched)
        self.watched.pool = lambda: self.blocks.pool

    def ask(self, prompt: tuple[int, ...], max_tokens: int, *, isolated: bool = False) -> str:
        return self.submit(prompt, max_tokens, sampling=Sampling(seed=len(self.tokens)), isolated=isolated)

    def batches(self) -> list[set[int]]:
        """Return the numbers of the requests in each step so far."""
        return [numbers_in(plan) for plan in self.runner.plans]

    def run_until_decoding(self, name: str) -> None:
        while not self.tokens[name]:
            self.turn()

    def turn_of_start(self, name: str) -> int:
        while name not in self.cached:
            self.turn()
        return self.turns


def numbers_in(plan: StepPlan) -> set[int]:
    return {work.sampling.seed for work in plan.work}


@pytest.mark.parametrize("ahead", [False, True])
def test_it_is_alone_in_its_batches_until_its_first_token(ahead: bool) -> None:
    rig = Rig(ahead=ahead)
    rig.run_until_decoding(rig.ask((1, 2, 3), 30))
    isolated, after = rig.ask(LONG_PROMPT, 5, isolated=True), rig.ask((4, 5), 20)
    rig.run()
    batches = rig.batches()
    first = batches.index({1})
    assert batches[first : first + 3] == [{1}] * 3
    assert not any(1 in batch for batch in batches[:first])
    assert {0, 1, 2} in batches[first + 3 :]
    assert {1} not in batches[first + 3 :]
    for number, name, prompt in ((1, isolated, LONG_PROMPT), (2, after, (4, 5))):
        expected = expected_tokens(prompt, number, len(rig.tokens[name]), frozenset(), VOCABULARY)
        assert rig.tokens[name] == expected


def test_nothing_is_computed_in_the_turn_that_delivers_its_start() -> None:
    rig = Rig()
    rig.run_until_decoding(rig.ask((1, 2, 3), 30))
    rig.ask(LONG_PROMPT, 5, isolated=True)
    started: list[Started] = []
    while not started:
        started = [output for output in rig.turn().outputs if isinstance(output, Started)]
    assert started[0].isolated
    assert rig.batches()[-1] == {0}
    rig.turn()
    assert rig.batches()[-1] == {1}


def test_several_run_one_after_the_other_with_a_step_of_others_between() -> None:
    rig = Rig()
    rig.run_until_decoding(rig.ask((1, 2, 3), 40))
    names = [rig.ask((number, 7, 8), 30, isolated=True) for number in (4, 5, 6)]
    for before, name in pairwise(names):
        rig.run_until_decoding(before)
        assert name not in rig.cached
        steps = len(rig.runner.plans)
        rig.run_until_decoding(name)
        assert any(0 in batch for batch in rig.batches()[steps:])
    rig.run()
    assert {0, 1, 2, 3} in rig.batches()


def test_a_beam_search_which_has_no_token_before_its_end_is_alone_until_then() -> None:
    rig = Rig()
    rig.run_until_decoding(rig.ask((1, 2, 3), 40))
    search = BeamSearch(2)
    name = rig.submit((4, 5), 6, sampling=GREEDY, beam_search=search, isolated=True)
    steps = len(rig.runner.plans)
    rig.turn_until(lambda: name in rig.finished)
    widths = [{work.candidates > 0 for work in plan.work} for plan in rig.runner.plans[steps:]]
    assert widths.count({True}) == 6
    assert {True, False} not in widths


def test_it_delays_others_no_longer_than_the_limit() -> None:
    rig = Rig(isolation_turns=2)
    rig.run_until_decoding(rig.ask((1, 2, 3), 30))
    rig.ask(LONG_PROMPT, 5, isolated=True)
    rig.run()
    batches = rig.batches()
    first = batches.index({1})
    assert batches[first : first + 3] == [{1}, {1}, {0, 1}]


def test_others_continue_if_they_hold_the_blocks_that_it_lacks() -> None:
    rig = Rig(device_blocks=9)
    first = rig.ask((1, 2, 3), 20)
    rig.turn_until(lambda: len(rig.tokens[first]) >= 12)  # it holds 4 blocks, and is not preempted for a later one
    search = BeamSearch(2)
    name = rig.submit((4, 5), 14, sampling=GREEDY, beam_search=search, isolated=True)  # needs up to 8
    rig.run()
    (answer, _), *_ = expected_answers((4, 5), search, 14, frozenset(), VOCABULARY)
    assert rig.tokens[name] == answer
