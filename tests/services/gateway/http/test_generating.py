"""HTTP generates the same output as gRPC for the same request."""

import json
from typing import Any

import httpx
import pytest
from google.protobuf.json_format import ParseDict

from quire.v1 import gateway_pb2
from tests.running_quire import Answer, RunningQuire
from tests.services.gateway.http.responses import events

PROMPT = "The quick brown fox"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?"}]
LIMIT = {"max_tokens": 12}
LEFT_OUT = {"anyOf": [{"type": "string", "pattern": "(?=a)b"}, {"const": 5}]}
DIGITS = "[0-9]{3}-[0-9]{3}"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "wild": {"type": "boolean"}},
    "required": ["kind", "wild"],
    "additionalProperties": False,
}

# Fields of HTTP, and the same fields of GenerateRequest.
SAME = [
    ({}, {}),
    ({"temperature": 0}, {"sampling": {"temperature": 0}}),
    ({"top_k": 5, "top_p": 0.9, "min_p": 0.01}, {"sampling": {"topK": 5, "topP": 0.9, "minP": 0.01}}),
    ({"top_k": -1}, {}),
    (
        {"presence_penalty": 1.5, "frequency_penalty": 1, "repetition_penalty": 1.2},
        {"logitRules": {"presencePenalty": 1.5, "frequencyPenalty": 1, "repetitionPenalty": 1.2}},
    ),
    ({"logit_bias": {"70": 100, "71": -5}}, {"logitRules": {"logitBias": {70: 100, 71: -5}}}),
    ({"allowed_token_ids": [65, 66, 67]}, {"logitRules": {"allowedTokenIds": [65, 66, 67]}}),
    ({"bad_words": ["e", "th", " a"]}, {"logitRules": {"badWords": ["e", "th", " a"]}}),
    ({"truncate_prompt_tokens": 5}, {"truncatePromptTokens": 5}),
    ({"min_tokens": 12, "ignore_eos": True}, {"stopping": {"minTokens": 12, "ignoreEos": True}}),
    ({"stop_token_ids": list(range(100, 200))}, {"stopping": {"stopTokenIds": list(range(100, 200))}}),
    (
        {"stop": ["a", "e"], "include_stop_str_in_output": True},
        {"stopping": {"stopStrings": ["a", "e"], "includeStop": True}},
    ),
    ({"stop": "o"}, {"stopping": {"stopStrings": ["o"]}}),
    (
        {"skip_special_tokens": False, "logit_bias": {"1": 100}},
        {"output": {"specialTokens": True}, "logitRules": {"logitBias": {1: 100}}},
    ),
    ({"guided_regex": DIGITS}, {"constraint": {"regex": DIGITS}}),
    ({"structured_outputs": {"regex": DIGITS}}, {"constraint": {"regex": DIGITS}}),
    ({"guided_choice": ["(a.b)", "c|d - e"]}, {"constraint": {"regex": r"\(a\.b\)|c\|d \- e"}}),
    ({"guided_json": SCHEMA}, {"constraint": {"jsonSchema": json.dumps(SCHEMA)}}),
    ({"use_beam_search": True, "best_of": 3}, {"beamSearch": {"width": 3}}),
    (
        {"use_beam_search": True, "best_of": 3, "n": 2, "length_penalty": 0.5, "early_stopping": True},
        {"beamSearch": {"width": 3, "lengthPenalty": 0.5, "earlyStopping": True}, "sampling": {"sampleCount": 2}},
    ),
    ({"priority": 3, "cache_salt": "mine", "timeout": 30}, {"priority": 3, "cache": {"salt": "mine"}}),
]  # fmt: skip


def generated(quire: RunningQuire, fields: dict[str, Any], **prompt: Any) -> list[str]:
    """Return the texts generated over gRPC."""
    request = ParseDict(fields, gateway_pb2.GenerateRequest())
    request.prompt.CopyFrom(ParseDict(prompt, gateway_pb2.Prompt()))
    request.sampling.seed = 7
    request.stopping.max_tokens = 12
    return texts_of(quire.generate(request))


def texts_of(answer: Answer) -> list[str]:
    texts = [""] * len(answer.finished.samples)
    for delta in answer.deltas:
        texts[delta.sample] += delta.text
    return texts


def close(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize(("body", "fields"), SAME)
def test_a_completion_equals_that_of_grpc(
    tiny_quire: RunningQuire, http: httpx.Client, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    response = http.post("/v1/completions", json={"prompt": PROMPT, "seed": 7, **LIMIT, **body})
    assert response.status_code == 200, response.text
    assert [choice["text"] for choice in response.json()["choices"]] == generated(tiny_quire, fields, text=PROMPT)


def test_a_chat_equals_that_of_grpc(tiny_quire: RunningQuire, http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": CHAT, "seed": 7, "n": 2, "max_completion_tokens": 12})
    texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert texts == generated(tiny_quire, {"sampling": {"sampleCount": 2}}, chat={"messages": CHAT})
    parts = [{"type": "text", "text": "Why is the sky blue?"}]
    in_parts = [CHAT[0], {"role": "user", "content": parts}]
    again = http.post("/v1/chat/completions", json={"messages": in_parts, "seed": 7, "n": 2, **LIMIT})
    assert [choice["message"]["content"] for choice in again.json()["choices"]] == texts


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_equals_the_complete_response(http: httpx.Client, path: str) -> None:
    prompt = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": CHAT}
    body = {**prompt, "seed": 7, "n": 2, "stop": ["ck", "e"], **LIMIT}
    whole = http.post(path, json=body).json()
    streamed = list(events(http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})))
    texts, reasons = {0: "", 1: ""}, {}
    for chunk in streamed[:-1]:
        assert chunk["usage"] is None
        for choice in chunk["choices"]:
            text = choice["text"] if path == "/v1/completions" else choice["delta"].get("content", "")
            texts[choice["index"]] += text
            reasons[choice["index"]] = choice["finish_reason"]
    expected = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in whole["choices"]]
    assert [texts[0], texts[1]] == expected
    assert [reasons[0], reasons[1]] == [choice["finish_reason"] for choice in whole["choices"]]
    assert streamed[-1]["choices"] == []
    counted = {name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert counted.items() <= streamed[-1]["usage"].items()
    assert {chunk["id"] for chunk in streamed} == {streamed[0]["id"]}


def test_each_chunk_can_have_the_usage_so_far(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": CHAT, "seed": 7, "stream": True, "stream_options": options, **LIMIT}
    counts = [chunk["usage"] for chunk in events(http.post("/v1/chat/completions", json=body))]
    generated = [count["completion_tokens"] for count in counts]
    assert generated == sorted(generated)
    assert (generated[0], generated[-2], generated[-1]) == (0, 12, 12)
    assert {count["prompt_tokens"] for count in counts} == {counts[-1]["prompt_tokens"]}


def test_the_usage_so_far_counts_all_choices_and_never_falls(http: httpx.Client) -> None:
    """Clients take the counts of the last chunk that has some as those of the response."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [PROMPT, "Once", "a b c"], "n": 2, "seed": 7, "stream": True, "stream_options": options, **LIMIT}
    counts = [chunk["usage"] for chunk in events(http.post("/v1/completions", json=body))]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        values = [count[name] for count in counts]
        assert values == sorted(values), name
        assert values[-2] == values[-1], name
    assert counts[-1]["completion_tokens"] == 6 * LIMIT["max_tokens"]


def test_several_prompts_are_completed_in_one_response(tiny_quire: RunningQuire, http: httpx.Client) -> None:
    prompts = [PROMPT, "Once upon"]
    expected = [text for one in prompts for text in generated(tiny_quire, {"sampling": {"sampleCount": 2}}, text=one)]
    body = {"prompt": prompts, "seed": 7, "n": 2, **LIMIT}
    answer = http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == expected
    ids = [http.post("/tokenize", json={"prompt": one}).json()["tokens"] for one in prompts]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    by_ids = http.post("/v1/completions", json={**body, "prompt": ids}).json()
    assert [choice["text"] for choice in by_ids["choices"]] == expected
    one = http.post("/v1/completions", json={**body, "prompt": ids[0]}).json()
    assert [choice["text"] for choice in one["choices"]] == expected[:2]
    texts = dict.fromkeys(range(4), "")
    for chunk in events(http.post("/v1/completions", json={**body, "stream": True})):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.values()) == expected


def test_a_cache_salt_separates_cached_prefixes(http: httpx.Client) -> None:
    def cached_tokens(salt: str) -> int:
        body = {"prompt": "Of this prompt some blocks of sixteen tokens are full", "cache_salt": salt, **LIMIT}
        usage = http.post("/v1/completions", json=body).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    first, again, other = map(cached_tokens, ("mine", "mine", "other"))
    assert first == other == 0 < again


def test_one_invalid_prompt_rejects_the_whole_request(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": [PROMPT, ""], **LIMIT, "stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt[1]")


SEVERAL_TOKENS = "The \N{TAMIL LETTER KA}\N{TAMIL LETTER NGA} \N{ROLLER SKATE} fox, \N{TAMIL LETTER CA} jumps again"


@pytest.mark.parametrize("max_tokens", [1, 24])
def test_offsets_are_within_the_text_where_characters_have_several_tokens(http: httpx.Client, max_tokens: int) -> None:
    ids = http.post("/tokenize", json={"prompt": SEVERAL_TOKENS}).json()["tokens"]
    for prompt in (SEVERAL_TOKENS, [1, *ids, 0]):
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": max_tokens, "seed": 7, "ignore_eos": True}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        text, offsets = choice["text"], choice["logprobs"]["text_offset"]
        assert text.startswith(SEVERAL_TOKENS)
        assert offsets == sorted(offsets)
        assert max(offsets) <= len(text)
        assert offsets[-max_tokens] == len(SEVERAL_TOKENS)
        spelled = zip(choice["logprobs"]["tokens"], offsets, strict=True)
        whole = [(token, offset) for token, offset in spelled if token.isascii() and not token.startswith("<")]
        assert len(whole) > 5
        assert all(text.startswith(token, offset) for token, offset in whole)


def test_log_probabilities_equal_those_of_grpc(tiny_quire: RunningQuire, http: httpx.Client) -> None:
    request = gateway_pb2.GenerateRequest()
    request.prompt.text = PROMPT
    request.sampling.seed = 7
    request.stopping.max_tokens = 6
    request.output.logprobs = 2
    request.output.prompt_logprobs = 2
    reference = tiny_quire.generate(request)
    body = {"prompt": PROMPT, "seed": 7, "max_tokens": 6, "logprobs": 2}
    returned = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert returned["token_logprobs"] == close([its.logprob for its in reference.logprobs])
    for tops, its in zip(returned["top_logprobs"], reference.logprobs, strict=True):
        assert max(tops.values()) == close(max(its.top_logprobs))  # two tokens can have one text
    assert returned["text_offset"][0] == 0
    assert max(returned["text_offset"]) <= len(http.post("/v1/completions", json=body).json()["choices"][0]["text"])
    streamed = events(http.post("/v1/completions", json={**body, "stream": True}))
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    for name in returned:
        values = [value for part in parts if part for value in part[name]]
        assert values == close(returned[name]) if name == "token_logprobs" else len(values) == len(returned[name])
    echoed = http.post("/v1/completions", json={**body, "echo": True}).json()["choices"][0]
    assert echoed["text"].startswith(PROMPT)
    before = [None, *(its.logprob for its in reference.prompt_logprobs)]
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert echoed["logprobs"]["token_logprobs"][1:] == close([*before[1:], *returned["token_logprobs"]])
    assert echoed["logprobs"]["text_offset"][len(before)] == len(PROMPT)
    prompt = http.post("/v1/completions", json={**body, "prompt_logprobs": 2}).json()["choices"][0]["prompt_logprobs"]
    assert prompt[0] is None
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert [its[str(token)]["logprob"] for token, its in zip(ids[1:], prompt[1:], strict=True)] == close(before[1:])


def test_log_probabilities_of_a_chat_have_the_bytes_of_each_token(tiny_quire: RunningQuire, http: httpx.Client) -> None:
    body = {"messages": CHAT, "seed": 7, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 9
    spelled = b"".join(bytes(token["bytes"]) for token in content)
    assert spelled.decode(errors="replace") == choice["message"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [2] * 9
    chunks = events(http.post("/v1/chat/completions", json={**body, "stream": True}))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    streamed = [token for part in parts if part for token in part["content"]]
    assert [token["bytes"] for token in streamed] == [token["bytes"] for token in content]
    assert [token["logprob"] for token in streamed] == close([token["logprob"] for token in content])


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}},
    ],
)
def test_the_output_follows_the_response_format(http: httpx.Client, response_format: Any) -> None:
    (brace,) = http.post("/tokenize", json={"prompt": "}"}).json()["tokens"]
    body = {"messages": CHAT, "seed": 3, "max_tokens": 60, "response_format": response_format}
    body["logit_bias"] = {str(brace): 100}  # close the object as soon as possible
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "guided_json": LEFT_OUT}),
        ("/v1/chat/completions", {"messages": CHAT, "guided_json": LEFT_OUT}),
        (
            "/v1/responses",
            {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "five", "schema": LEFT_OUT}}},
        ),
    ],
)
def test_an_answer_names_the_case_of_its_schema_that_was_left_out(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    whole = http.post(path, json=body).json()
    (warning,) = whole["warnings"]
    assert warning.startswith("#/anyOf/0 was left out: #/anyOf/0/pattern: look-around")
    assert f'"{warning}"' in http.post(path, json={**body, "stream": True}).text


def test_models_and_version(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny-llama", "model", 2048)
    assert http.get("/v1/models/tiny-llama").json() == model
    assert http.get("/version").json()["version"]


def test_the_client_can_choose_the_request_id(tiny_quire: RunningQuire, http: httpx.Client) -> None:
    body = {"prompt": PROMPT, **LIMIT}
    answer = http.post("/v1/completions", json={**body, "request_id": "two"})
    assert answer.json()["id"] == answer.headers["x-request-id"] == "cmpl-two"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 0}], ids=["answered", "refused"])
def test_the_header_of_the_request_is_repeated_and_need_not_be_unique(
    http: httpx.Client, stream: bool, fields: dict[str, Any]
) -> None:
    body, name = {"prompt": PROMPT, **LIMIT, "stream": stream, "n": 0 if fields else 1}, "trace-" + "7" * 114
    answers = [http.post("/v1/completions", json=body, headers={"x-request-id": name}) for _ in range(2)]
    assert [answer.headers["x-request-id"] for answer in answers] == [name] * 2
    assert {answer.status_code for answer in answers} == {400 if fields else 200}
    assert name not in "".join(answer.text for answer in answers)


@pytest.mark.parametrize("name", ["two words", "x" * 257, "\u00e9", ""])
def test_a_header_that_cannot_be_repeated_is_replaced(http: httpx.Client, name: str) -> None:
    headers = [(b"x-request-id", name.encode())]
    answer = http.post("/v1/completions", json={"prompt": PROMPT, **LIMIT}, headers=headers)
    assert answer.headers["x-request-id"] == answer.json()["id"]


def test_of_two_headers_neither_is_repeated(http: httpx.Client) -> None:
    headers = [("x-request-id", "one"), ("x-request-id", "two")]
    answer = http.post("/v1/completions", json={"prompt": PROMPT, **LIMIT}, headers=headers)
    assert answer.headers["x-request-id"] == answer.json()["id"]
