"""Prompts without an answer, as evaluations send them: `max_tokens` 0, mostly with `echo` and `logprobs`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.v1 import decoding_pb2, gateway_pb2
from tests.load import prompt_request
from tests.reference import reference_logprobs
from tests.running_quire import RunningQuire
from tests.services.gateway.http.responses import events

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = "The quick brown \N{TAMIL LETTER KA} fox"
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
ECHO = {"echo": True, "logprobs": 1, "max_tokens": 0}
# One more than the slots of the pool: the last token needs none.
MOST_TOKENS = 1025


def prompt_ids(http: httpx.Client, **prompt: Any) -> list[int]:
    return list(http.post("/tokenize", json=prompt).json()["tokens"])


def close(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("cached", [False, True], ids=["", "cached"])
@pytest.mark.parametrize("length", [1, 16, 17, MOST_TOKENS])
def test_an_echoed_prompt_has_the_log_probabilities_of_transformers(
    http: httpx.Client, tiny_model: Callable[[str], Path], length: int, cached: bool
) -> None:
    ids = [40 + 7 * number % 300 for number in range(length)]
    if cached:
        http.post(COMPLETIONS, json={"prompt": ids, "max_tokens": 0})
    answer = http.post(COMPLETIONS, json={"prompt": ids, **ECHO}).json()
    (choice,), scores = answer["choices"], answer["choices"][0]["logprobs"]
    reference = reference_logprobs(tiny_model("llama"), ids)
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][1:] == close([float(row[one]) for row, one in zip(reference, ids[1:], strict=True)])
    assert [max(top.values()) for top in scores["top_logprobs"][1:]] == close([float(row.max()) for row in reference])
    assert choice["finish_reason"] == "length"
    assert choice["text"] == http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert len(scores["tokens"]) == len(scores["text_offset"]) == length
    counts = answer["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"], counts["total_tokens"]) == (length, 0, length)


def test_a_prompt_that_needs_one_slot_more_is_refused(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": [70] * (MOST_TOKENS + 1), **ECHO})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    kept = {"prompt": [70] * 2000, "truncate_prompt_tokens": -1, "max_tokens": 0}
    assert http.post(COMPLETIONS, json=kept).json()["usage"]["prompt_tokens"] == MOST_TOKENS - 1


@pytest.mark.parametrize("fields", [{}, {"stop": "e"}, {"guided_regex": "a+"}, {"ignore_eos": True}])
def test_without_echo_the_text_is_empty(http: httpx.Client, fields: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "n": 2, "logprobs": 1, "max_tokens": 0, **fields}
    answer = http.post(COMPLETIONS, json=body).json()
    assert [(one["text"], one["finish_reason"]) for one in answer["choices"]] == [("", "length")] * 2
    assert [one["logprobs"]["tokens"] for one in answer["choices"]] == [[], []]
    chunks = list(events(http.post(COMPLETIONS, json={**body, "stream": True})))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["length"] * 2
    scored = http.post(COMPLETIONS, json={**body, "prompt_logprobs": 1}).json()["choices"]
    assert [len(one["prompt_logprobs"]) for one in scored] == [len(prompt_ids(http, prompt=PROMPT))] * 2


@pytest.mark.parametrize("most", [0, 9])
@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, "Once upon", "a"], [1, 70, 220, 71], [[65]]])
def test_a_stream_has_the_scores_of_echoed_prompts(http: httpx.Client, prompt: Any, most: int) -> None:
    body = {"prompt": prompt, "n": 2, "seed": 7, "return_token_ids": True, **ECHO, "max_tokens": most}
    whole = http.post(COMPLETIONS, json=body).json()
    for choice in whole["choices"]:
        parts = [
            one
            for chunk in events(http.post(COMPLETIONS, json={**body, "stream": True}))
            for one in chunk["choices"]
            if one["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert [token for part in parts for token in part.get("token_ids", ())] == choice["token_ids"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        scores = [part["logprobs"] for part in parts if part["logprobs"]]
        for name in ("tokens", "text_offset"):
            assert [value for one in scores for value in one[name]] == choice["logprobs"][name]
        values = [value for one in scores for value in one["token_logprobs"]]
        assert values[0] is choice["logprobs"]["token_logprobs"][0] is None
        assert values[1:] == close(choice["logprobs"]["token_logprobs"][1:])


def test_a_chat_without_an_answer_is_scored_but_no_empty_message_is_sent(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 0}
    answer = http.post(CHATS, json={**body, "prompt_logprobs": 1}).json()
    assert (
        len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] == len(prompt_ids(http, messages=MESSAGES))
    )
    assert answer["choices"][0]["finish_reason"] == "length"
    refused = http.post(CHATS, json=body).json()["error"]
    assert (refused["param"], refused["message"]) == ("max_tokens", "max_tokens must be at least 1, not 0")


@pytest.mark.parametrize("scored", [False, True])
def test_a_prompt_alone_over_grpc(tiny_quire: RunningQuire, scored: bool) -> None:
    request = prompt_request(PROMPT, 0)
    request.sampling.sample_count = 3
    if scored:
        request.output.prompt_logprobs = 2
    answer = tiny_quire.generate(request)
    assert answer.events == ["started", *["prompt_logprobs"] * scored, "finished"]
    assert len(answer.prompt_logprobs) == scored * (answer.started.prompt_tokens - 1)
    length = gateway_pb2.SampleFinish(reason=decoding_pb2.FINISH_REASON_LENGTH)
    assert list(answer.finished.samples) == [length] * 3
    assert answer.finished.usage.generated_tokens == answer.started.max_tokens == 0
    assert answer.finished.timing.decode.ToNanoseconds() == 0


def test_a_limit_that_the_client_has_not_set_is_what_fits(http: httpx.Client) -> None:
    ids = [70] * (MOST_TOKENS - 5)
    body = {"prompt": ids, "ignore_eos": True}
    assert http.post(COMPLETIONS, json=body).json()["usage"]["completion_tokens"] == 5
    answer = http.post(COMPLETIONS, json={**body, "max_tokens": 16})
    assert answer.json()["error"]["code"] == "context_length_exceeded"  # the pool is smaller than the context
    assert answer.json()["error"]["param"] == "max_tokens"
