"""Members without effect: what clients send by habit does not change an answer, and what would is refused by name."""

from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from services.gateway.http.member_policy import ANYWHERE, BODIES, CHATS, COMPLETIONS, MESSAGES, UnusedMember

USER: dict[str, Any] = {"role": "user", "content": "Why is the sky blue?"}
FIXED: dict[str, Any] = {"max_tokens": 4, "seed": 3}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
MARK = {"cache_control": {"type": "ephemeral"}, "provider_specific_fields": {"a": [1]}, "of_tomorrow": None}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# One value for each type of accepted values.
EXAMPLES = ("", [], {}, True, False, "none", ["text"], {"a": "b"}, "x")


def example(member: UnusedMember) -> Any:
    adapter = TypeAdapter(member.field_type)
    for value in EXAMPLES:
        try:
            return adapter.validate_python(value, strict=True)
        except ValueError:
            continue
    raise AssertionError(member)


def answered(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body | FIXED)
    assert answer.status_code == 200, answer.text
    choices, usage = answer.json()["choices"], answer.json()["usage"]
    return choices, usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "name"),
    [(COMPLETION, name) for name in (*BODIES, *COMPLETIONS)] + [(CHAT, name) for name in (*BODIES, *CHATS)],
)
def test_a_member_without_effect_changes_no_answer(http: httpx.Client, path: str, name: str) -> None:
    body: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"prompt": USER["content"]}
    plain = answered(http, path, body)
    member = (BODIES | COMPLETIONS | CHATS)[name]
    for value in (example(member), None):
        assert answered(http, path, body | {name: value}) == plain


@pytest.mark.parametrize("name", MESSAGES)
def test_a_member_of_a_message_without_effect_changes_no_prompt(http: httpx.Client, name: str) -> None:
    said = {"role": "assistant", "content": "Because."}
    plain = answered(http, CHAT, {"messages": [USER, said, USER]})
    assert answered(http, CHAT, {"messages": [USER, said | {name: example(MESSAGES[name])}, USER]}) == plain


def test_marks_are_accepted_in_every_object_and_so_is_null_under_any_name(http: httpx.Client) -> None:
    part = {"type": "text", "text": USER["content"]}
    plain = answered(http, CHAT, {"messages": [{**USER, "content": [part]}], "tools": [TOOL]})
    marked = {"messages": [{**USER, **MARK, "content": [part | MARK]}], "stream_options": {**MARK}, **MARK}
    marked["tools"] = [{**TOOL, **MARK, "function": TOOL["function"] | MARK}]
    assert answered(http, CHAT, marked) == plain
    assert set(ANYWHERE) < set(MARK)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "enabled", "budget_tokens": 100}},  # the model has no thoughts
        {"verbosity": "low"},
        {"top_logprobs": 0},
    ],
)
def test_what_means_nothing_for_the_model_changes_no_answer(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert answered(http, CHAT, {"messages": [USER]} | fields) == answered(http, CHAT, {"messages": [USER]})


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (COMPLETION, {"suffix": "end"}, "suffix", "it can only be an empty string"),
        (COMPLETION, {"reasoning_effort": "low"}, "reasoning_effort", "it can only be 'none'"),
        (COMPLETION, {"guided_grammar": "root ::= x"}, "guided_grammar", "it can only be an empty string"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions", "use tools"),
        (CHAT, {"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
        (CHAT, {"web_search_options": {}}, "web_search_options", "is not supported"),
        (CHAT, {"user": 5}, "user", "must be a string"),
        (CHAT, {"of_tomorrow": 0}, "of_tomorrow", "is not a field of this request"),
        (CHAT, {"messages": [USER | {"refusal": "No."}]}, "messages[0].refusal", "it can only be an empty string"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    body: dict[str, Any] = {"messages": [USER]} if path == CHAT else {"prompt": "a"}
    answer = http.post(path, json=body | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert words in answer.json()["error"]["message"]


def test_completions_take_either_name_of_their_limit(http: httpx.Client) -> None:
    body = {"prompt": "Once", "ignore_eos": True}
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        assert http.post(COMPLETION, json=body | limit).json()["usage"]["completion_tokens"] == 3
    answer = http.post(COMPLETION, json=body | {"max_tokens": 3, "max_completion_tokens": 4})
    assert answer.json()["error"]["param"] == "max_tokens"
    answer = http.post(COMPLETION, json=body | {"max_completion_tokens": 5000})
    assert answer.json()["error"]["param"] == "max_completion_tokens"
