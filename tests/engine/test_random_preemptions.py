"""Random swaps change no token. The acceptance tests run fifty rounds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.random_preemptions import run_round


@pytest.mark.parametrize("number", range(3))
def test_requests_swapped_at_random_get_the_answers_of_a_large_pool(
    tiny_model: Callable[[str], Path], number: int
) -> None:
    assert run_round(tiny_model("llama"), number).swaps > 0
