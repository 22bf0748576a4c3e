"""What the engine takes of a request's numbers, whatever a gateway has let pass."""

import math

import pytest

from engine.errors import InvalidRequest
from engine.request import Capacity, Request, Sampling, Stopping


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "top_k"])
@pytest.mark.parametrize("value", [-1, -5e-324, math.nan, math.inf, -math.inf])
def test_numbers_that_no_sampling_has_are_refused_by_name(field: str, value: float) -> None:
    if field == "top_k" and value != -1:
        pytest.skip("it is an integer")
    request = Request("r", (5,), Sampling(**{field: value}), Stopping(4))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        Capacity(2048, 384, 4, 64).check(request)
    assert caught.value.field == f"sampling.{field}"
