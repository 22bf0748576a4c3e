"""Checks of a request's fields, independent of a gateway's checks."""

import math

import pytest

from engine.errors import InvalidRequest
from engine.schedule.request import Capacity, Request, Sampling, Stopping

NUMBERS = (-1, -1e-300, math.nan, math.inf, -math.inf)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *((f"sampling.{field}", value, field) for field in ("temperature", "top_p", "min_p") for value in NUMBERS),
        ("sampling.top_k", -1, "top_k"),
        *(
            (field, value, "must have at most .* bytes, not")
            for field, value in (("request_id", "i" * 513), ("request_id", "ö" * 257), ("salt", bytes(481)))
        ),
    ],
)
def test_an_invalid_field_is_refused_by_name(field: str, value: object, words: str) -> None:
    sampling = Sampling(**{words: value}) if field.startswith("sampling.") else Sampling()  # type: ignore[arg-type]
    rest = {"request_id": "r"} if field.startswith("sampling.") else {"request_id": "r", field: value}
    with pytest.raises(InvalidRequest, match=words) as caught:
        Capacity(2048, 384, 4, 64).check(
            Request(prompt=(5,), sampling=sampling, stopping=Stopping(4), **rest)  # type: ignore[arg-type]
        )
    assert caught.value.field == field
