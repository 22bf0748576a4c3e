"""Requests that a gateway refuses, while another client's stream continues."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from quire.v1 import gateway_pb2
from services.runtime.errors import FIELD_METADATA
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running.neighbour import Neighbour, tokens_over_grpc
from tests.running_quire import CALL_SECONDS, RunningQuire
from tests.timing import standing_still
from tests.tiny_models import CONTEXT, VOCABULARY

_LIMIT = f"this model's maximum context length is {CONTEXT} tokens"
INVALID = grpc.StatusCode.INVALID_ARGUMENT

INFINITY, NAN = float("inf"), float("nan")

PROMPT = "The quick brown fox"


@pytest.fixture(scope="module", autouse=True)
def neighbour(tiny_quire: RunningQuire) -> Iterator[Neighbour]:
    one = Neighbour(lambda: tokens_over_grpc(tiny_quire.gateway))
    yield one
    one.close()
    assert one.faults == []
    assert one.streams > 0


@pytest.fixture(autouse=True)
def _others_continue(tiny_quire: RunningQuire, neighbour: Neighbour) -> Iterator[None]:
    yield
    neighbour.wait_for_tokens()
    assert tiny_quire.settled_pool(sequences=1).sequences <= 1, "a refused request holds blocks"


def base() -> gateway_pb2.GenerateRequest:
    return prompt_request(PROMPT, 4)


def refusal(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Return the status, the message and the blamed field of a call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    metadata = dict(caught.value.trailing_metadata())
    return caught.value.code(), caught.value.details(), metadata.get(FIELD_METADATA, "")


def refuse(quire: RunningQuire, request: gateway_pb2.GenerateRequest) -> tuple[grpc.StatusCode, str, str]:
    return refusal(quire.gateway.Generate(request, timeout=CALL_SECONDS))


def change(**fields: Any) -> Callable[[gateway_pb2.GenerateRequest], None]:
    """Return a function that replaces fields, such as sampling={"top_k": -1}."""

    def apply(request: gateway_pb2.GenerateRequest) -> None:
        for name in fields:
            request.ClearField(name)  # type: ignore[arg-type]
        request.MergeFrom(gateway_pb2.GenerateRequest(**fields))

    return apply


def prompt(**kind: Any) -> Callable[[gateway_pb2.GenerateRequest], None]:
    return change(prompt=kind)


def sampling(**fields: Any) -> Callable[[gateway_pb2.GenerateRequest], None]:
    return change(sampling=fields)


def stopping(**fields: Any) -> Callable[[gateway_pb2.GenerateRequest], None]:
    return change(stopping=fields)


def rules(**fields: Any) -> Callable[[gateway_pb2.GenerateRequest], None]:
    return change(logit_rules=fields)


def output(**fields: Any) -> Callable[[gateway_pb2.GenerateRequest], None]:
    return change(output=fields)


def nothing_to_choose(request: gateway_pb2.GenerateRequest) -> None:
    """Allow only end tokens, while min_tokens forbids both at the first token."""
    request.logit_rules.allowed_token_ids.extend([0, 9])
    request.stopping.stop_token_ids.append(9)
    request.stopping.min_tokens = 1


def beams(width: int = 2, length_penalty: float = 1.0, ends: int = 0) -> Callable[[gateway_pb2.GenerateRequest], None]:
    search = {"width": width, "length_penalty": length_penalty}
    return change(beam_search=search, sampling={}, stopping={"max_tokens": 4, "stop_token_ids": range(9, 9 + ends)})


def timeout(seconds: float) -> Callable[[gateway_pb2.GenerateRequest], None]:
    return change(timeout=timedelta(seconds=seconds))


def tool(request: gateway_pb2.GenerateRequest) -> None:
    request.prompt.chat.messages.add(role="user", content="x")
    request.prompt.chat.tools.add(name="x", parameters='{"type": "string"}')


def calls(*names: str, parameters: str = "{}") -> Callable[[gateway_pb2.GenerateRequest], None]:
    def change(request: gateway_pb2.GenerateRequest) -> None:
        request.stopping.ClearField("ignore_eos")
        for name in names:
            request.constraint.tool_calls.tools.add(name=name, parameters=parameters)

    return change


OUT_OF_RANGE = [
    ("no prompt", prompt(), "prompt", "must be given"),
    ("an empty text", prompt(text=""), "prompt.text", "empty"),
    ("no token ids", prompt(token_ids={}), "prompt.token_ids.ids", "empty"),
    ("no messages", prompt(chat={}), "prompt.chat.messages", "empty"),
    ("a token id beyond the vocabulary", prompt(token_ids={"ids": [1, VOCABULARY]}), "prompt.token_ids.ids[1]", "384"),
    ("a negative token id", prompt(token_ids={"ids": [-1]}), "prompt.token_ids.ids[0]", "-1"),
    ("a negative temperature", sampling(temperature=-0.5), "sampling.temperature", "-0.5"),
    ("a temperature that is not a number", sampling(temperature=float("nan")), "sampling.temperature", "nan"),
    ("an infinite temperature", sampling(temperature=float("inf")), "sampling.temperature", "inf"),
    ("top_p 0", sampling(top_p=0), "sampling.top_p", "0"),
    ("top_p above 1", sampling(top_p=1.5), "sampling.top_p", "1.5"),
    ("top_p that is not a number", sampling(top_p=float("nan")), "sampling.top_p", "nan"),
    ("a negative top_k", sampling(top_k=-1), "sampling.top_k", "-1"),
    ("min_p above 1", sampling(min_p=2), "sampling.min_p", "2"),
    ("a negative min_p", sampling(min_p=-0.1), "sampling.min_p", "-0.1"),
    ("no samples", sampling(sample_count=0), "sampling.sample_count", "0"),
    ("more samples than the maximum", sampling(sample_count=129), "sampling.sample_count", "129"),
    ("more samples than run at once", sampling(sample_count=65), "sampling.sample_count", "65"),
    ("negative max_tokens", stopping(max_tokens=-5), "stopping.max_tokens", "-5"),
    ("300 stop strings", stopping(stop_strings=["x"] * 300), "stopping.stop_strings", "300"),
    ("an empty stop string", stopping(stop_strings=["x", ""]), "stopping.stop_strings[1]", "not 0"),
    ("a stop string of 2000 bytes", stopping(stop_strings=["ö" * 1000]), "stopping.stop_strings[0]", "not 2000"),
    ("a stop token beyond the vocabulary", stopping(stop_token_ids=[3, 400]), "stopping.stop_token_ids[1]", "400"),
    ("a negative stop token", stopping(stop_token_ids=[-7]), "stopping.stop_token_ids[0]", "-7"),
    ("negative min_tokens", stopping(min_tokens=-1), "stopping.min_tokens", "-1"),
    ("min_tokens above max_tokens", stopping(max_tokens=4, min_tokens=5), "stopping.min_tokens", "4"),
    ("min_tokens beyond the pool", stopping(min_tokens=5000), "stopping.min_tokens", "5000"),
    ("a repetition penalty of 0", rules(repetition_penalty=0), "logit_rules.repetition_penalty", "0"),
    ("a negative repetition penalty", rules(repetition_penalty=-1.5), "logit_rules.repetition_penalty", "-1.5"),
    ("an infinite repetition penalty", rules(repetition_penalty=INFINITY), "logit_rules.repetition_penalty", "inf"),
    ("a presence penalty that is not a number", rules(presence_penalty=NAN), "logit_rules.presence_penalty", "nan"),
    ("an infinite frequency penalty", rules(frequency_penalty=-INFINITY), "logit_rules.frequency_penalty", "-inf"),
    ("a bias that is not a number", rules(logit_bias={3: 1.0, 5: NAN}), "logit_rules.logit_bias[5]", "nan"),
    ("a bias beyond the vocabulary", rules(logit_bias={400: 1.0}), "logit_rules.logit_bias[400]", "383"),
    ("a bias of a negative token", rules(logit_bias={-2: 1.0}), "logit_rules.logit_bias[-2]", "-2"),
    ("an allowed token beyond", rules(allowed_token_ids=[3, 384]), "logit_rules.allowed_token_ids[1]", "384"),
    ("a negative allowed token", rules(allowed_token_ids=[-9]), "logit_rules.allowed_token_ids[0]", "-9"),
    ("300 bad words", rules(bad_words=["x"] * 300), "logit_rules.bad_words", "300"),
    ("an empty bad word", rules(bad_words=["x", ""]), "logit_rules.bad_words[1]", "not 0"),
    ("a bad word of 300 bytes", rules(bad_words=["ö" * 150]), "logit_rules.bad_words[0]", "not 300"),
    ("a bad word of 40 tokens", rules(bad_words=["x", "日本" * 20]), "logit_rules.bad_words[1]", "32 tokens"),
    ("a truncation to no token", change(truncate_prompt_tokens=0), "truncate_prompt_tokens", "not 0"),
    ("a truncation to -2 tokens", change(truncate_prompt_tokens=-2), "truncate_prompt_tokens", "not -2"),
    ("a truncation above the context", change(truncate_prompt_tokens=2049), "truncate_prompt_tokens", "2048"),
    ("nothing to choose", nothing_to_choose, "logit_rules.allowed_token_ids", "no token to choose"),
    ("21 logprobs", output(logprobs=21), "output.logprobs", "21"),
    ("negative logprobs", output(logprobs=-1), "output.logprobs", "-1"),
    ("21 prompt_logprobs", output(prompt_logprobs=21), "output.prompt_logprobs", "21"),
    ("negative prompt_logprobs", output(prompt_logprobs=-3), "output.prompt_logprobs", "-3"),
    ("a request id of 129 bytes", change(request_id="i" * 129), "request_id", "129"),
    ("a salt of 257 bytes", change(cache={"salt": "ö" * 128 + "s"}), "cache.salt", "257"),
    ("a timeout of 0", timeout(0), "timeout", "0"),
    ("a negative timeout", timeout(-1), "timeout", "-1"),
    ("a timeout of more than a day", timeout(86_401), "timeout", "86401"),
    ("a timeout of mixed signs", change(timeout=Duration(seconds=1, nanos=-5)), "timeout", "1 s and -5 ns"),
    ("a request id with a control character", change(request_id="a\x1b"), "request_id", "'a\\x1b'"),
    ("a timeout beyond a Duration", change(timeout=Duration(seconds=2**62)), "timeout", "86400"),
    ("a length penalty of 500", beams(length_penalty=500), "beam_search.length_penalty", "500"),
    ("a length penalty of -1e9", beams(length_penalty=-1e9), "beam_search.length_penalty", "-1000000000"),
    ("a tool whose arguments are a string", tool, "prompt.chat.tools[0].parameters", "'object', not \"string\""),
    (
        "a call whose arguments are a list",
        calls("x", parameters='{"type": "array"}'),
        "constraint.tool_calls.tools[0].parameters",
        "'object', not \"array\"",
    ),
    ("a call without a name", calls("x", ""), "constraint.tool_calls.tools[1].name", "empty"),
    ("two calls of one name", calls("x", "x"), "constraint.tool_calls.tools[1].name", "that of constraint"),
    ("more end tokens than a search considers", beams(width=14, ends=300), "stopping.stop_token_ids", "4096"),
]


@pytest.mark.parametrize(
    ("invalidate", "field", "reason"), [case[1:] for case in OUT_OF_RANGE], ids=[case[0] for case in OUT_OF_RANGE]
)
def test_a_value_out_of_range_is_refused_naming_its_field(
    tiny_quire: RunningQuire, invalidate: Callable[[gateway_pb2.GenerateRequest], None], field: str, reason: str
) -> None:
    request = base()
    invalidate(request)
    code, message, blamed = refuse(tiny_quire, request)
    assert (code, blamed) == (INVALID, field)
    assert message.startswith(field)
    assert reason in message.removeprefix(field)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "numbers"),
    [
        (40, CONTEXT - 39, ("40", str(CONTEXT - 39), str(CONTEXT))),  # one token over the context
        (1000, 26, ("1000", "26", "65", "64")),  # one block over the pool
        (1025, None, ("1025", "65", "64")),
    ],
)
def test_a_request_that_can_never_fit_is_refused_naming_both_numbers(
    tiny_quire: RunningQuire, prompt_tokens: int, max_tokens: int | None, numbers: tuple[str, ...]
) -> None:
    request = base()
    request.prompt.token_ids.ids.extend([5] * prompt_tokens)
    request.stopping.ClearField("max_tokens")
    if max_tokens is not None:
        request.stopping.max_tokens = max_tokens
    code, message, blamed = refuse(tiny_quire, request)
    assert (code, blamed) == (INVALID, "stopping.max_tokens" if prompt_tokens <= 1024 else "prompt")
    for number in ("prompt", "stopping.max_tokens", *numbers):
        assert number in message


def test_a_prompt_longer_than_the_context_is_refused_before_it_is_tokenized(tiny_quire: RunningQuire) -> None:
    request = base()
    request.prompt.token_ids.ids.extend([VOCABULARY] * (CONTEXT + 1))  # its ids are not checked either
    code, message, blamed = refuse(tiny_quire, request)
    assert (code, blamed) == (INVALID, "prompt.token_ids.ids")
    assert message == f"prompt.token_ids.ids must have at most {CONTEXT} tokens, not {CONTEXT + 1}: {_LIMIT}"


def test_an_unknown_model_is_not_found_by_any_call(tiny_quire: RunningQuire) -> None:
    gateway = tiny_quire.gateway
    request = base()
    request.model = "gpt-9"
    calls: list[Any] = [
        gateway.Generate(request),
        (gateway.Tokenize(gateway_pb2.TokenizeRequest(model="gpt-9", prompt=request.prompt)) for _ in "x"),
        (gateway.GetModel(gateway_pb2.GetModelRequest(model="gpt-9")) for _ in "x"),
    ]
    for call in calls:
        code, message, blamed = refusal(call)
        assert (code, blamed) == (grpc.StatusCode.NOT_FOUND, "model")
        assert "gpt-9" in message
        assert "tiny-llama" in message


def test_tokenize_refuses_an_empty_prompt(tiny_quire: RunningQuire) -> None:
    request = gateway_pb2.TokenizeRequest()
    code, _, blamed = refusal(tiny_quire.gateway.Tokenize(request) for _ in "x")
    assert (code, blamed) == (INVALID, "prompt")


def test_tokenize_refuses_token_ids_outside_the_vocabulary(tiny_quire: RunningQuire) -> None:
    request = gateway_pb2.TokenizeRequest()
    request.prompt.token_ids.ids.append(VOCABULARY)
    code, _, blamed = refusal(tiny_quire.gateway.Tokenize(request) for _ in "x")
    assert (code, blamed) == (INVALID, "prompt.token_ids.ids[0]")


def test_the_id_of_a_live_request_is_refused_and_free_again_after_it(tiny_quire: RunningQuire) -> None:
    request = prompt_request(PROMPT, 400)
    request.request_id = "twice"
    with standing_still(tiny_quire.children()["engine"]):
        live = tiny_quire.gateway.Generate(request, timeout=CALL_SECONDS)
        wait_until(lambda: tiny_quire.open_streams() == 2, "the request and the neighbour's stream are in flight")
        code, message, blamed = refuse(tiny_quire, request)
    assert next(live).HasField("started")
    assert (code, blamed) == (grpc.StatusCode.ALREADY_EXISTS, "request_id")
    assert "twice" in message
    assert next(live).delta.token_ids, "the refusal ended the live request"
    live.cancel()
    request.stopping.max_tokens = 2
    assert len(answer_of_freed_id(tiny_quire, request)) == 2


def test_an_impossible_max_tokens_is_refused_before_it_counts_at_an_engine(tiny_quire: RunningQuire) -> None:
    request = base()
    request.stopping.max_tokens = 2**31 - 1
    with standing_still(tiny_quire.children()["engine"]):
        assert refusal(tiny_quire.gateway.Generate(request, timeout=CALL_SECONDS))[2] == "stopping.max_tokens"


def answer_of_freed_id(quire: RunningQuire, request: gateway_pb2.GenerateRequest) -> list[int]:
    """Return the answer once the gateway has received the cancellation, which gives no event."""
    answers: list[list[int]] = []

    def answered() -> bool:
        try:
            answers.append(quire.generate(request).token_ids)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.ALREADY_EXISTS:
                raise
        return bool(answers)

    wait_until(answered, "the id is free again after its request was cancelled")
    return answers[0]


# Malformed bytes


def raw_call(quire: RunningQuire, method: str, data: bytes) -> Any:
    return quire.channel.unary_stream(f"/quire.v1.Gateway/{method}", None, None)(data, timeout=CALL_SECONDS)


def test_a_stop_string_that_is_not_utf8_is_refused_with_its_index(tiny_quire: RunningQuire) -> None:
    request = base()
    request.stopping.stop_strings.extend(["fine", "XYZ"])
    data = request.SerializeToString().replace(b"XYZ", b"X\xffZ")
    code, message, blamed = refusal(raw_call(tiny_quire, "Generate", data))
    assert (code, blamed) == (INVALID, "stopping.stop_strings[1]")
    assert message == "stopping.stop_strings[1] is not valid UTF-8"


def test_a_prompt_that_is_not_utf8_is_refused_by_tokenize_too(tiny_quire: RunningQuire) -> None:
    request = gateway_pb2.TokenizeRequest()
    request.prompt.text = "XYZ"
    data = request.SerializeToString().replace(b"XYZ", b"\xc3\x28!")
    assert refusal(raw_call(tiny_quire, "Tokenize", data)) == (INVALID, "prompt.text is not valid UTF-8", "prompt.text")


def test_an_unknown_method_is_unimplemented(tiny_quire: RunningQuire) -> None:
    assert refusal(raw_call(tiny_quire, "Regenerate", b""))[0] == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("mib", "code"),
    [
        (20, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (4.1, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (3.9, grpc.StatusCode.NOT_FOUND),  # parsed; the model is unknown
    ],
)
def test_a_gateway_accepts_messages_of_at_most_4_mib(
    tiny_quire: RunningQuire, mib: float, code: grpc.StatusCode
) -> None:
    request = base()
    request.model = "gpt-9"
    request.prompt.text = "x" * int(mib * 1024 * 1024)
    assert refuse(tiny_quire, request)[0] == code


def test_a_prompt_that_takes_long_to_tokenize_does_not_block_other_requests(
    tiny_quire: RunningQuire, neighbour: Neighbour
) -> None:
    request = base()
    request.prompt.text = "Words " * 100_000
    call = tiny_quire.gateway.Generate(request, timeout=CALL_SECONDS)
    neighbour.wait_for_tokens()
    code, message, _ = refusal(call)
    assert code == INVALID
    assert str(CONTEXT) in message


def test_a_chat_that_the_template_rejects_is_refused_with_its_message(tiny_quire: RunningQuire) -> None:
    request = base()
    request.prompt.chat.messages.add(role="critic", content="Hello?")
    code, message, blamed = refuse(tiny_quire, request)
    assert (code, blamed) == (INVALID, "prompt.chat")
    assert message.startswith("prompt.chat: ")
    assert message.endswith("No critic may begin.")
