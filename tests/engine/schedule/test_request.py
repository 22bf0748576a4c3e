"""Checks of a request's numbers, independent of a gateway's checks."""

import math

import pytest

from engine.errors import InvalidRequest
from engine.schedule.request import Capacity, Request, Sampling, Stopping


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "top_k"])
@pytest.mark.parametrize("value", [-1, -1e-300, math.nan, math.inf, -math.inf])
def test_invalid_sampling_parameters_are_refused_naming_the_field(field: str, value: float) -> None:
    if field == "top_k" and value != -1:
        pytest.skip("it is an integer")
    request = Request("r", (5,), Sampling(**{field: value}), Stopping(4))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        Capacity(2048, 384, 4, 64).check(request)
    assert caught.value.field == f"sampling.{field}"


@pytest.mark.parametrize(
    ("field", "value"), [("request_id", "i" * 513), ("request_id", "ö" * 257), ("salt", bytes(481))]
)
def test_a_too_long_id_or_salt_is_refused_naming_the_field(field: str, value: str | bytes) -> None:
    fields = {"request_id": "r", field: value}
    request = Request(prompt=(5,), sampling=Sampling(), stopping=Stopping(4), **fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"must have at most .* bytes, not") as caught:
        Capacity(2048, 384, 4, 64).check(request)
    assert caught.value.field == field
