"""The computation of figure 16 without Quire: by hand, and beside the simulation of the product."""

from pathlib import Path
from typing import Any

import pytest

from bench.loads.memory import DATA_VARIABLE, Lengths
from bench.papers.simulation.cost_model import StepLoad
from bench.papers.simulation.run import simulate
from bench.papers.simulation.shared_prefix_alone import _Server, alone
from tests.bench.papers.papers_data import write_traces

SERVER: dict[str, Any] = {"model": "opt-13b", "device": "a100-40g", "ranks": 1, "block_size": 16, "cost": "fit"}


class OneSecond:
    def seconds(self, load: StepLoad) -> float:
        return 1.0


def served(blocks: int, prefix: int, *, paged: bool) -> float:
    """Requests per second of 8 tokens of prompt behind a prefix, and 8 of output, one second a step."""
    server = _Server([Lengths(8, 8)], prefix, OneSecond(), blocks, 4, paged=paged)
    return server.requests_per_second(400)


def test_orca_holds_as_many_requests_as_powers_of_two_of_their_blocks_fit() -> None:
    """24 tokens are 6 blocks, of which 8 are reserved: four requests in 32 blocks, each for 8 steps."""
    assert served(32, 8, paged=False) == pytest.approx(4 / 8, rel=0.02)


def test_the_paged_server_holds_the_whole_blocks_of_the_prefix_once() -> None:
    """Beside two blocks of the prefix, each request grows from 3 to 4 blocks of its own: between 7 and 10 in 30."""
    assert 7 / 8 <= served(32, 8, paged=True) <= 10 / 8


def test_it_agrees_with_the_simulation_of_the_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both systems are overloaded; the product's admission and preemption are other code."""
    monkeypatch.setenv(DATA_VARIABLE, str(write_traces(tmp_path)))
    apart = alone(blocks=300, prefix=160, ended=600, **SERVER)
    scenario = {**SERVER, "blocks": 300, "workload": "translation", "prefix_tokens": 160, "rate": 250.0}
    for system, rate in apart.items():
        result = simulate(system=system, seconds=12.0, **scenario)
        assert result["finished"] / result["simulated_seconds"] == pytest.approx(rate, rel=0.1), system
