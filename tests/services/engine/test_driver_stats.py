"""What a driver reports about its requests while a step runs."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.engine.observer import EngineStats
from tests.engine_in_process import ModelEngine
from tests.services.engine.test_driver_faults import Driven

pytestmark = pytest.mark.anyio

CHUNK = 16
PROMPT = [20 + token % 50 for token in range(4 * CHUNK)]


class HeldLaunches:
    """Records a driver's stats at each launch of a step, and holds the first launch until it is released."""

    def __init__(self, model: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stats: list[EngineStats] = []
        self.driven: Driven | None = None
        self.holds, self.released = threading.Event(), threading.Event()
        self._launch = model.engine._runner.launch
        monkeypatch.setattr(model.engine._runner, "launch", self._hold)

    def _hold(self, plan: Any) -> Any:
        assert self.driven is not None
        self.stats.append(self.driven.driver.stats)
        self.holds.set()
        assert self.released.wait(60)
        return self._launch(plan)


async def test_requests_are_counted_when_a_step_starts_not_when_the_one_before_it_ended(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelEngine(tiny_model("llama"), token_budget=CHUNK)
    launches = HeldLaunches(model, monkeypatch)
    launches.driven = driven = Driven(model)
    try:
        names = [f"r{number}" for number in range(8)]
        driven.submit(names[0], prompt_token_ids=PROMPT)
        assert launches.holds.wait(60)
        for name in names[1:]:
            driven.submit(name, prompt_token_ids=PROMPT)
        launches.released.set()
        await driven.ends(*names)
    finally:
        launches.released.set()
        await driven.close()
    first, second = ((one.running, one.waiting, one.deferred) for one in launches.stats[:2])
    assert first == (1, 0, 0), "the request of the first step has blocks"
    assert second == (1, 7, 7), "the others wait for the prefix that it computes"
