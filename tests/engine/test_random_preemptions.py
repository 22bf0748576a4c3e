"""Random swaps change no token. Fifty rounds of this are in the acceptance tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.random_preemptions import run_round


@pytest.mark.parametrize("number", range(3))
def test_requests_that_are_swapped_at_random_get_the_answers_of_a_roomy_pool(
    tiny_model: Callable[[str], Path], number: int
) -> None:
    assert run_round(tiny_model("llama"), number).swaps > 0
