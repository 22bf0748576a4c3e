"""Recording searches of the demo model, and replaying them."""

from pathlib import Path

import pytest

# First, because it sets how threads of torch wait.
from bench.loads.engine_worker import BFLOAT16, demo_parts  # isort: skip
from bench.papers.record_searches import recorded
from bench.papers.simulation.beam_trace import RecordedSearches


@pytest.mark.usefixtures("demo_model")
def test_recorded_searches_begin_at_the_prompt_and_name_living_parents(demo_model: Path) -> None:
    searches = recorded(4, demo_parts(64, **BFLOAT16), range(100, 400), 3, 12)
    assert [len(one) for one in searches] == [4 * 11] * 3
    assert all(one.startswith("0000") and set(one) <= set("0123") for one in searches)
    replayed = RecordedSearches(4, searches)
    living = replayed.first(0)
    for _ in range(10):
        living = [child for node in living for child in replayed.children(node)]
        assert len(living) == 4
