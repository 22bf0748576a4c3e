"""Requests are checked by the rules of their fields in the protos."""

import math
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.run.logit_rules import MAX_LOGIT
from engine.run.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE
from engine.schedule.request import MAX_LOGPROBS, Sampling
from quire.v1 import decoding_pb2, engine_pb2, field_rules_pb2, gateway_pb2
from services.runtime.errors import InvalidField
from services.wire.field_rules import check, check_alone, declared_fields, effective, field_paths, fill
from services.wire.requests.request import check as check_submission
from services.wire.requests.request import request_of

Request: Any = gateway_pb2.GenerateRequest
Submission: Any = engine_pb2.Submission
ROOTS = (Request.DESCRIPTOR, Submission.DESCRIPTOR)
PATHS = [path for root in ROOTS for path in field_paths(root)]
INF, NAN = math.inf, math.nan
# Ranges written once more, apart from the protos.
RANGES = {
    "sampling.temperature": lambda number: 0 <= number < INF,
    "sampling.top_p": lambda number: 0 < number <= 1,
    "sampling.min_p": lambda number: 0 <= number <= 1,
    "logit_rules.repetition_penalty": lambda number: 0 < number < INF,
    "logit_rules.presence_penalty": math.isfinite,
    "logit_rules.frequency_penalty": math.isfinite,
    "beam_search.length_penalty": lambda number: -10 <= number <= 10,
}
EDGES = (0.0, 5e-324, 1.0, math.nextafter(1, 2), 10.0, math.nextafter(10, 11), 1e308, INF, NAN)
NUMBERS = st.sampled_from((*EDGES, *(-edge for edge in EDGES))) | st.floats()


def refused(request: Any) -> str:
    """The path of the field that is refused, empty if none is."""
    try:
        check(request, InvalidField)
    except InvalidField as refusal:
        return refusal.field
    return ""


@pytest.mark.parametrize("path", RANGES)
@given(number=NUMBERS)
def test_a_number_is_refused_exactly_outside_its_range(path: str, number: float) -> None:
    part, name = path.split(".")
    request = Request(**{part: {name: number}})
    assert refused(request) == ("" if RANGES[path](number) else path)


@pytest.mark.parametrize(
    ("submission", "field"),
    [
        ({"request_id": "i" * 513}, "request_id"),
        ({"request_id": "ö" * 257}, "request_id"),
        ({"salt": bytes(481)}, "salt"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"sampling": {"sample_count": 0}}, "sampling.sample_count"),
        ({"samples": [{}] * 129}, "samples"),
        ({"age": {"seconds": -1}}, "age"),
        ({"timeout": {"seconds": 315_576_000_001}}, "timeout"),
        ({"logit_rules": {"logit_bias": {4: NAN, 9: INF}}}, "logit_rules.logit_bias[4]"),
        ({"beam_search": {}, "logprobs": 0}, "logprobs"),
        ({"beam_search": {}, "sampling": {"temperature": 0.5}}, "sampling.temperature"),
        ({"constraint": {"regex": "a"}, "bad_words": [{"token_ids": [1]}]}, "bad_words"),
        ({"constraint": {"regex": "a"}, "stopping": {"min_tokens": 1}}, "stopping.min_tokens"),
        ({"constraint": {"regex": "a"}, "stopping": {"ignore_eos": True}}, "stopping.ignore_eos"),
        ({"constraint": {"regex": "a"}, "logit_rules": {"allowed_token_ids": [3]}}, "logit_rules.allowed_token_ids"),
    ],
)
def test_an_engine_refuses_a_submission_by_name(submission: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_submission(Submission(**submission))
    assert caught.value.field == field


def test_a_field_is_excluded_only_with_a_value_that_has_an_effect() -> None:
    neutral = {"sampling": {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}}
    assert refused(Request(beam_search={}, **neutral)) == ""
    assert refused(Request(beam_search={}, sampling={"temperature": 1})) == "sampling.temperature"
    assert refused(Request(beam_search={}, sampling={"top_p": 0.5})) == "sampling.top_p"
    assert refused(Request(beam_search={}, output={"logprobs": 0})) == "output.logprobs"


def test_a_field_beside_its_limit_is_compared_with_the_value_or_the_default() -> None:
    assert refused(Request(sampling={"sample_count": 2})) == ""
    assert refused(Request(beam_search={}, sampling={"sample_count": 2})) == "sampling.sample_count"
    assert refused(Request(beam_search={"width": 2}, sampling={"sample_count": 2})) == ""
    assert refused(Request(stopping={"min_tokens": 9})) == ""
    assert refused(Request(stopping={"min_tokens": 9, "max_tokens": 8})) == "stopping.min_tokens"


def test_an_exclusion_can_be_checked_under_another_name() -> None:
    request = Request(stopping={"ignore_eos": True})
    with pytest.raises(InvalidField, match=r"^stopping.ignore_eos cannot be combined with tool_choice$"):
        check_alone(request, "constraint", "tool_choice", InvalidField)


def test_a_constraint_is_named_with_its_kind() -> None:
    request = Request(constraint={"json_object": True}, stopping={"min_tokens": 1})
    with pytest.raises(InvalidField, match=r"cannot be combined with constraint\.json_object"):
        check(request, InvalidField)


SECRET = "what a client wrote"


@pytest.mark.parametrize(
    "request_",
    [
        Request(request_id=SECRET * 10),
        Request(cache={"salt": SECRET * 20}),
        Request(logit_rules={"bad_words": [SECRET * 20]}),
        Request(stopping={"stop_strings": [SECRET] * 70}),
        Request(constraint={"regex": SECRET * 5000}),
        Request(prompt={"chat": {}}, constraint={"tool_calls": {"tools": [{"name": "", "parameters": SECRET}]}}),
    ],
)
def test_no_error_repeats_a_text_of_the_request(request_: Request) -> None:
    with pytest.raises(InvalidField) as caught:
        check(request_, InvalidField)
    assert SECRET not in str(caught.value)


def test_absent_fields_get_their_defaults_and_given_ones_stay() -> None:
    search = decoding_pb2.BeamSearch(length_penalty=0)
    fill(search)
    assert search == decoding_pb2.BeamSearch(width=1, length_penalty=0, early_stopping=False)


@pytest.mark.parametrize(("given", "value"), [(0.0, 0.0), (1e-300, 1e-30), (1e-30, 1e-30), (0.7, 0.7), (1e300, 1e30)])
def test_a_temperature_is_clamped_but_for_0(given: float, value: float) -> None:
    assert effective(decoding_pb2.Sampling(temperature=given), "temperature") == value


def test_an_engine_samples_with_the_defaults_of_absent_fields() -> None:
    read = request_of(Submission(logit_rules={"repetition_penalty": 1e300}), frozenset(), 0.0)
    assert read.sampling == Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    assert read.logit_rules.repetition_penalty == 1e9


# The rules themselves


def test_a_number_that_a_float_of_32_bits_cannot_hold_does_not_become_the_0_that_turns_a_filter_off() -> None:
    assert effective(decoding_pb2.Sampling(top_n_sigma=5e-324), "top_n_sigma") == 1e-30
    assert effective(decoding_pb2.Sampling(), "top_n_sigma") == 0


def test_the_rules_agree_with_the_engine() -> None:
    temperature = declared_fields(decoding_pb2.Sampling.DESCRIPTOR)["temperature"].rules
    assert (temperature.clamp_min, temperature.clamp_max) == (MIN_TEMPERATURE, MAX_TEMPERATURE)
    assert {
        path.field.rules.clamp_max for path in field_paths(decoding_pb2.LogitRules.DESCRIPTOR) if path.field.is_fraction
    } == {MAX_LOGIT}
    assert declared_fields(gateway_pb2.OutputOptions.DESCRIPTOR)["logprobs"].rules.max == MAX_LOGPROBS


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.text)
def test_rules_are_consistent(path: Any) -> None:
    field, rules = path.field, path.field.rules
    assert rules.summary == "" or rules.summary.endswith(".")
    if field.default is not None:
        assert field.value_type == FieldDescriptor.TYPE_BOOL or field.holds(field.default)
        assert field.descriptor.has_presence, "absent and default differ"
    if rules.at_most:
        assert rules.at_most in {other.text for other in PATHS}


def test_every_field_of_a_clients_request_has_a_sentence() -> None:
    without = {path.text for path in field_paths(Request.DESCRIPTOR) if not path.field.rules.summary}
    assert without == set()


def test_every_exclusion_names_a_field_of_a_request() -> None:
    def names(message: Descriptor | None, path: str) -> bool:
        first, _, rest = path.partition(".")
        field = message.fields_by_name.get(first) if message else None
        return field is not None and (not rest or names(field.message_type, rest))

    for message in (decoding_pb2.BeamSearch, decoding_pb2.OutputConstraint):
        exclusions = message.DESCRIPTOR.GetOptions().Extensions[field_rules_pb2.excludes]
        assert exclusions
        assert [one.field for one in exclusions if not any(names(root, one.field) for root in ROOTS)] == []
