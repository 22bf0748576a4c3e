"""What requests of smg become, and what is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as smg_pb

from engine.errors import InvalidRequest
from quire.v1 import decoding_pb2, engine_pb2
from services.engine.smg.field_names import FieldNames
from services.engine.smg.request_fields import REQUEST, SAMPLING, TOKENIZED
from services.engine.smg.submissions import RequestLimits, check_request, submission_of
from services.runtime.errors import ContextExceeded, InvalidField, ServiceError, UnsupportedField
from services.wire.requests.request import check

LIMITS = RequestLimits(context_tokens=64, block_size=4, request_blocks=32)
LARGEST = 2**32 - 1


def request(input_ids: tuple[int, ...] = (5, 6, 7), **sampling: Any) -> smg_pb.GenerateRequest:
    return smg_pb.GenerateRequest(
        request_id="r",
        tokenized=smg_pb.TokenizedInput(input_ids=input_ids),
        sampling_params=smg_pb.SamplingParams(**sampling),
    )


def submitted(given: smg_pb.GenerateRequest, limits: RequestLimits = LIMITS) -> engine_pb2.Submission:
    check_request(given)
    submission = submission_of(given, given.tokenized.input_ids, limits)
    check(submission)
    return submission


def refusal(given: smg_pb.GenerateRequest) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        submitted(given)
    return caught.value


def test_a_request_that_leaves_all_out_samples_at_temperature_1_as_long_as_it_fits() -> None:
    submission = submitted(request())
    sampling, rules = submission.sampling, submission.logit_rules
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty) == (1, 0, 0)
    assert submission.stopping.max_tokens == 64 - 3
    assert len(submission.samples) == 1
    assert not submission.HasField("constraint")
    assert not submission.HasField("logprobs")
    assert submission.salt == b""


def test_requests_without_a_seed_differ_in_it() -> None:
    assert submitted(request()).sampling.seed != submitted(request()).sampling.seed
    assert submitted(request(seed=-3)).sampling.seed == -3


# What each field of SamplingParams changes in a submission: a value, and where it is found.
FOLLOWED: dict[str, tuple[Any, Callable[[engine_pb2.Submission], Any], Any]] = {
    "temperature": (0.7, lambda one: one.sampling.temperature, 0.7),
    "top_p": (0.9, lambda one: one.sampling.top_p, 0.9),
    "top_k": (40, lambda one: one.sampling.top_k, 40),
    "min_p": (0.05, lambda one: one.sampling.min_p, 0.05),
    "seed": (7, lambda one: one.sampling.seed, 7),
    "n": (3, lambda one: (one.sampling.sample_count, len(one.samples)), (3, 3)),
    "logit_bias": ({5: -100.0}, lambda one: dict(one.logit_rules.logit_bias), {5: -100.0}),
    "frequency_penalty": (0.1, lambda one: one.logit_rules.frequency_penalty, 0.1),
    "presence_penalty": (0.2, lambda one: one.logit_rules.presence_penalty, 0.2),
    "repetition_penalty": (1.1, lambda one: one.logit_rules.repetition_penalty, 1.1),
    "max_tokens": (9, lambda one: one.stopping.max_tokens, 9),
    "min_tokens": (2, lambda one: one.stopping.min_tokens, 2),
    "stop_token_ids": ([8], lambda one: list(one.stopping.stop_token_ids), [8]),
    "ignore_eos": (True, lambda one: one.stopping.ignore_eos, True),
    "truncate_prompt_tokens": (2, lambda one: list(one.prompt_token_ids), [6, 7]),
    "logprobs": (4, lambda one: one.logprobs, 4),
    "prompt_logprobs": (0, lambda one: (one.HasField("prompt_logprobs"), one.prompt_logprobs), (True, 0)),
    "json_schema": ("{}", lambda one: one.constraint.json_schema, "{}"),
    "json_object": (True, lambda one: one.constraint.json_object, True),
    "regex": ("[ab]", lambda one: one.constraint.regex, "[ab]"),
    "choice": (smg_pb.ChoiceConstraint(choices=["a.", "b"]), lambda one: one.constraint.regex, r"a\.|b"),
}
# In the answers: see test_serve_smg.py.
IN_ANSWERS = {"stop", "skip_special_tokens", "include_stop_str_in_output", "spaces_between_special_tokens"}
# Grammars always begin at the first token.
ALWAYS = {"grammar_from_first_token"}


@pytest.mark.parametrize("name", sorted(FOLLOWED))
def test_a_sampling_parameter_is_followed(name: str) -> None:
    value, found, expected = FOLLOWED[name]
    assert found(submitted(request(**{name: value}))) == expected
    assert found(submitted(request())) != expected


def test_each_sampling_parameter_is_followed_or_refused() -> None:
    names = {field.name for field in smg_pb.SamplingParams.DESCRIPTOR.fields}
    assert names == {*FOLLOWED, *IN_ANSWERS, *ALWAYS, *SAMPLING.reasons}
    assert set(SAMPLING.fields) == {*FOLLOWED, *IN_ANSWERS, *ALWAYS}


def set_field(message: Message, field: Any) -> None:
    """Give a field a value that is not its default."""
    if field.message_type is not None:
        target = getattr(message, field.name)
        if field.is_repeated:
            target.add()
        else:
            target.SetInParent()
    else:
        setattr(message, field.name, "x" if field.type == FieldDescriptor.TYPE_STRING else 1)


@pytest.mark.parametrize(
    ("owner", "prefix", "followed"),
    [
        (lambda one: one, "", REQUEST),
        (lambda one: one.tokenized, "tokenized.", TOKENIZED),
        (lambda one: one.sampling_params, "sampling_params.", SAMPLING),
    ],
    ids=["request", "tokenized", "sampling_params"],
)
def test_every_other_field_is_refused_by_its_name(
    owner: Callable[[smg_pb.GenerateRequest], Message], prefix: str, followed: Any
) -> None:
    fields = owner(request()).DESCRIPTOR.fields
    others = [field for field in fields if field.name not in followed.fields]
    assert {field.name for field in others} == set(followed.reasons)
    for field in others:
        one = request()
        set_field(owner(one), field)
        error = refusal(one)
        assert isinstance(error, UnsupportedField)
        assert error.field == prefix + field.name
        assert str(error).startswith(f"{prefix}{field.name} is not supported: ")


def test_a_field_of_a_later_protocol_is_refused_by_its_number() -> None:
    later = request()
    later.sampling_params.MergeFromString(bytes([0xC0, 0x3E, 0x01]))  # field 1000, a varint
    error = refusal(later)
    assert isinstance(error, UnsupportedField)
    assert error.field == "sampling_params.field 1000"


INVALID: dict[str, tuple[smg_pb.GenerateRequest, type[ServiceError]]] = {
    "request_id": (smg_pb.GenerateRequest(text="x"), InvalidField),
    "tokenized": (smg_pb.GenerateRequest(request_id="r"), InvalidField),
    "data_parallel_rank": (smg_pb.GenerateRequest(request_id="r", text="x", data_parallel_rank=1), InvalidField),
    "tokenized.input_ids": (request((LARGEST,)), InvalidField),
    "sampling_params.logprobs": (request(logprobs=-1), UnsupportedField),
    "sampling_params.prompt_logprobs": (request(prompt_logprobs=-1), UnsupportedField),
    "sampling_params.n": (request(n=LARGEST), InvalidField),
    "sampling_params.temperature": (request(temperature=-1), InvalidField),
    "sampling_params.top_p": (request(top_p=1.5), InvalidField),
    "sampling_params.max_tokens": (request(max_tokens=LARGEST), InvalidField),
    "sampling_params.min_tokens": (request(min_tokens=LARGEST), InvalidField),
    "sampling_params.stop_token_ids": (request(stop_token_ids=[LARGEST]), InvalidField),
    "sampling_params.truncate_prompt_tokens": (request(truncate_prompt_tokens=0), InvalidField),
    "sampling_params.choice": (request(choice=smg_pb.ChoiceConstraint()), InvalidField),
    "sampling_params.json_object": (request(json_object=False), InvalidField),
    "sampling_params.stop[1]": (request(stop=["a", ""]), InvalidField),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_value_is_refused_by_the_name_of_its_field(name: str) -> None:
    given, kind = INVALID[name]
    error = refusal(given)
    assert type(error) is kind
    assert error.field == name
    assert name.split("[")[0] in str(error)


@pytest.mark.parametrize("choices", [["x" * 65537], ["xy"] * 40000])
def test_too_many_or_too_long_choices_are_refused_with_their_bound(choices: list[str]) -> None:
    error = refusal(request(choice=smg_pb.ChoiceConstraint(choices=choices)))
    size = len("|".join(choices))
    rule = f"must have between 1 and 65536 bytes, not {size}"
    assert (str(error), error.field) == (
        f"sampling_params.choice, written as one regular expression, {rule}",
        "sampling_params.choice",
    )


NAMED = [
    (
        "stopping.min_tokens must be at most stopping.max_tokens",
        "stopping.min_tokens",
        "sampling_params.min_tokens must be at most sampling_params.max_tokens",
    ),
    (
        "logit_rules.logit_bias[5] must be at most 1",
        "logit_rules.logit_bias[5]",
        "sampling_params.logit_bias[5] must be at most 1",
    ),
    (
        "stopping.ignore_eos cannot be combined with constraint.json_object",
        "stopping.ignore_eos",
        "sampling_params.ignore_eos cannot be combined with sampling_params.json_object",
    ),
    ("prompt must not be empty", "prompt", "tokenized.input_ids must not be empty"),
    ("the prompt has logprobs. constraint.regexes", "", "the prompt has logprobs. constraint.regexes"),
]


@pytest.mark.parametrize(("detail", "field", "expected"), NAMED)
def test_errors_have_smgs_names_of_all_fields(detail: str, field: str, expected: str) -> None:
    names = FieldNames(request())
    assert names.sentence(detail, field) == expected
    if field:
        assert expected.startswith(names.field(field))


def test_the_expression_of_choices_is_named_after_them() -> None:
    names = FieldNames(request(choice=smg_pb.ChoiceConstraint(choices=["a"])))
    assert names.field("constraint.regex") == "sampling_params.choice"
    assert names.sentence("constraint.regex: too large") == "sampling_params.choice: too large"
    assert FieldNames(request(regex="a")).field("constraint.regex") == "sampling_params.regex"


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    error = refusal(request(tuple(range(65))))
    assert isinstance(error, ContextExceeded)
    assert (error.prompt_tokens, error.context_tokens) == (65, 64)


def test_a_prompt_is_cut_to_what_fits_with_the_answer() -> None:
    submission = submitted(request(tuple(range(100)), truncate_prompt_tokens=-1, max_tokens=10))
    assert list(submission.prompt_token_ids) == list(range(46, 100))


def test_values_of_gateways_rules_are_refused_later_with_the_rest_of_the_submission() -> None:
    with pytest.raises(InvalidRequest) as caught:
        submitted(request(min_tokens=5, max_tokens=4))
    assert caught.value.field == "stopping.min_tokens"


@given(st.floats(0, 2, width=32))
def test_numbers_of_32_bits_change_by_less_than_their_rounding(value: float) -> None:
    assert submitted(request(temperature=value)).sampling.temperature == pytest.approx(value, rel=1e-7, abs=1e-44)


@given(st.integers(0, 200).map(lambda hundredths: hundredths / 100))
def test_numbers_that_clients_write_are_the_same_as_at_a_gateway(value: float) -> None:
    sampling = submitted(request(temperature=value)).sampling
    assert sampling.temperature == decoding_pb2.Sampling(temperature=value).temperature


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 40))
def test_the_tokens_that_fit_fill_the_pool_or_the_context(prompt: int, sequences: int, blocks: int) -> None:
    limits = LIMITS._replace(request_blocks=blocks)
    most = limits.most_tokens(prompt, sequences)

    def needed(tokens: int) -> int:
        shared = prompt // 4
        return shared + sequences * (-(-(tokens - 1) // 4) - shared)

    assert most <= 64
    if most > prompt:
        assert needed(most) <= blocks
        assert most == 64 or needed(most + 1) > blocks
