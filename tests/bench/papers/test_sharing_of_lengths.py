"""Figure 15 by arithmetic, beside a count token by token and the simulation."""

from pathlib import Path
from typing import Any

import pytest

from bench.loads.memory import DATA_VARIABLE
from bench.papers.sharing_of_lengths import saved_by_samples
from bench.papers.simulation.run import simulate
from bench.papers.simulation.traces import load
from tests.bench.papers.papers_data import write_traces


@pytest.fixture(autouse=True)
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(write_traces(tmp_path)))


@pytest.mark.parametrize("width", [2, 6])
def test_the_share_is_that_of_blocks_counted_after_each_token(width: int) -> None:
    saved = unshared = 0
    for prompt, output in load("sharegpt"):
        for tokens in range(1, output + 1):
            saved += (width - 1) * (prompt // 16)
            unshared += width * -(-(prompt + tokens) // 16)
    assert saved_by_samples("sharegpt", [width], 16) == {str(width): pytest.approx(saved / unshared)}


def test_a_simulation_saves_about_as_much() -> None:
    base: dict[str, Any] = {"system": "paged", "model": "opt-13b", "device": "a100-40g", "blocks": 983}
    scenario = {**base, "workload": "sharegpt", "rate": 6.0, "seconds": 200.0, "samples": 2, "preemption": "swap"}
    shares = simulate(**scenario, warm_up=1 / 3)["shares"]
    expected = saved_by_samples("sharegpt", [2], 16)["2"]
    assert shares["saved"] / shares["unshared"] == pytest.approx(expected, abs=0.04)
