"""The engine's loop sleeps only when something will wake it: random ends, forks, stops, late answers and lost pools.

`EngineInProcess.turn` checks each turn: a loop that may sleep has no request, waits for an answer that is late, or has
lost its block manager.
"""

import random

import pytest

from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.request import BeamSearch, Sampling
from engine.schedule.scheduler import IdleReason
from simulation.runner import DigestRunner
from tests.engine.watched_scheduler import WatchedScheduler
from tests.engine_in_process import GREEDY, EngineInProcess

CONTEXT, VOCABULARY = 64, 50
TURN_SECONDS = 0.001  # reports of lengths come each second, and each would count as progress
SCHEDULES = 100
REQUESTS = 12
MOST_TURNS = 3000


class _Schedule:
    """Random requests, and what ends them, in a pool in which most samples have room for all their tokens."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        size = self.draw.choice([2, 16, 32])
        capacity = Capacity(CONTEXT, VOCABULARY, size, 6 * CONTEXT // size, self.draw.choice([0, 16]))
        ahead = self.draw.random() < 0.3
        self.scheduler = WatchedScheduler(capacity, Limits(self.draw.choice([8, 64]), 8), ahead=ahead)
        self.engine = EngineInProcess(DigestRunner(capacity), capacity, scheduler=self.scheduler)
        self.engine.turn_seconds = TURN_SECONDS
        self.scheduler.pool = lambda: self.engine.blocks.pool
        self.samples: dict[str, int] = {}
        self.lost_turns = 0

    def run(self) -> None:
        for number in range(REQUESTS):
            self._submit(number)
            for _ in range(self.draw.randint(0, 5)):
                self._turn()
        for _ in range(MOST_TURNS):
            if self.scheduler.empty and not self.lost_turns:
                break
            self._turn()
        self.engine.turn()
        assert self.engine.turn().idle is IdleReason.EMPTY
        self.engine.assert_released()
        assert self.engine.finished.keys() == self.samples.keys()

    def _submit(self, number: int) -> None:
        draw, name, samples = self.draw, f"r{number}", self.draw.randint(1, 4)
        search = BeamSearch(samples) if draw.random() < 0.2 else None
        now = self.engine.turns * TURN_SECONDS
        self.engine.submit(
            draw.choices(range(VOCABULARY), k=draw.randint(1, 20)),
            draw.randint(1, 12),
            sampling=GREEDY if search else Sampling(seed=number),
            samples=samples,
            beam_search=search,
            request_id=name,
            deadline=now + draw.randint(1, 30) * TURN_SECONDS if draw.random() < 0.2 else None,
        )
        self.samples[name] = samples

    def _turn(self) -> None:
        self._end_some()
        self._disturb()
        self.engine.turn()
        self.scheduler.idle_reason(connected=self.engine.blocks.ready)  # checked after turns with progress too

    def _end_some(self) -> None:
        draw = self.draw
        for name in self.scheduler.live():
            for index in range(self.samples[name]):
                if draw.random() < 0.15:
                    self.scheduler.requests.end_sample(name, index)
            if draw.random() < 0.01:
                self.scheduler.requests.cancel(name)

    def _disturb(self) -> None:
        chance = self.draw.random()
        if self.lost_turns:
            self.lost_turns -= 1
            if not self.lost_turns:
                self.engine.blocks.restore()
        elif chance < 0.02:
            self.engine.blocks.lose()
            self.lost_turns = self.draw.randint(1, 4)
        elif chance < 0.1:
            self.engine.blocks.delay = self.draw.randint(1, 4)


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_a_loop_sleeps_only_when_something_will_wake_it(seed: int) -> None:
    _Schedule(seed).run()
