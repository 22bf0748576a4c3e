"""No number of a request hurts another: each case ends in an answer, or in a refusal that names a field."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from quire.v1 import engine_pb2, gateway_pb2
from tests.running_quire import RunningQuire
from tests.services.extremes import FIELDS, Outcomes, run_cases

CASES = 250  # 20,000 in tests/acceptance
PAGE = Path(__file__).parents[2] / "docs" / "api-grpc.md"

# Fields whose name in the extremes differs from the protos.
NAMES = {"prompt.token_ids.ids": "prompt", "prompt_token_ids": "prompt"}
NUMBERS = {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_DOUBLE}


def test_numbers_at_their_extremes_in_pairs_end_well_or_are_refused_by_name(tiny_quire: RunningQuire) -> None:
    outcomes = Outcomes()
    run_cases(tiny_quire, range(CASES), outcomes)
    assert outcomes.faults == []
    assert sum(outcomes.ends.values()) == CASES
    assert min(outcomes.ends["engine: OK"], outcomes.ends["gateway: OK"]) > CASES / 5, "most of them are computed with"


@pytest.mark.parametrize("message", [gateway_pb2.GenerateRequest, engine_pb2.Submission])
def test_the_extreme_requests_vary_every_number_of_a_request(message: type[gateway_pb2.GenerateRequest]) -> None:
    paths = {NAMES.get(path, path) for path in numbers(message.DESCRIPTOR)}
    assert paths - FIELDS.keys() == set()


def test_the_page_of_the_api_has_every_number_of_a_request() -> None:
    page = PAGE.read_text()
    missing = {path for path in numbers(gateway_pb2.GenerateRequest.DESCRIPTOR) if f"`{path}`" not in page}
    assert missing == set()


def numbers(message: Descriptor, path: str = "") -> Iterator[str]:
    for field in message.fields:
        name = f"{path}{field.name}"
        if field.cpp_type in NUMBERS:
            yield name
        elif field.message_type is None or field.message_type.full_name == "quire.v1.Chat":
            continue
        elif field.message_type.full_name == "google.protobuf.Duration" or field.message_type.GetOptions().map_entry:
            yield name
        else:
            yield from numbers(field.message_type, f"{name}.")
