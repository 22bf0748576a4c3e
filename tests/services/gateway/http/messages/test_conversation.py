"""How the conversation of /v1/messages becomes that of a chat, and what is refused."""

from typing import Any

import pytest

from services.gateway.http.anthropic.conversation import MessageConversation
from services.gateway.http.anthropic.request_schemas import MessagesRequest
from services.runtime.errors import InvalidField

SAID = {"role": "user", "content": "Hi"}


def use(call_id: str, name: str = "look", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def result(call_id: str, content: Any = "ship", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def thought(said: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": said, "signature": "x"}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def converted(*messages: dict[str, Any], **body: Any) -> MessageConversation:
    return MessageConversation(MessagesRequest.model_validate({"messages": list(messages), "max_tokens": 1, **body}))


def chat(*messages: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    return [one.model_dump(exclude_none=True) for one in converted(*messages, **body).messages]


def test_the_system_message_stands_in_front() -> None:
    system = [{**text("Be brief."), "cache_control": {"type": "ephemeral"}}, text("Be kind.")]
    expected = {"role": "system", "content": "Be brief.\nBe kind."}
    assert chat(SAID, system=system) == [expected, SAID]
    assert chat({"role": "system", "content": "Be kind."}, SAID, system="Be brief.") == [expected, SAID]


def test_what_claude_code_says_to_its_provider_is_no_part_of_the_prompt() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1; cch=00000;")
    assert chat(SAID, system=[billing, text("Be brief.")])[0] == {"role": "system", "content": "Be brief."}
    assert chat(SAID, system=[billing]) == [SAID]
    joined = f"{billing['text']}\nBe brief."
    assert chat(SAID, system=joined)[0] == {"role": "system", "content": "Be brief."}


def test_a_later_system_message_is_a_part_of_the_user_s_turn() -> None:
    assert chat(SAID, {"role": "system", "content": "New rule."}) == [
        {"role": "user", "content": "Hi\n<system>\nNew rule.\n</system>"}
    ]


def test_a_system_message_can_stand_between_a_call_and_its_result() -> None:
    given = [SAID, assistant(use("a")), {"role": "system", "content": "New rule."}, user(result("a"))]
    assert [one["role"] for one in chat(*given)] == ["user", "assistant", "tool", "user"]


def test_messages_of_one_author_are_one_turn() -> None:
    given = [SAID, user(text("Look."), text("Now.")), assistant(text("Yes.")), assistant(text("I do.")), SAID]
    assert chat(*given) == [
        {"role": "user", "content": "Hi\nLook.\nNow."},
        {"role": "assistant", "content": "Yes.\nI do."},
        SAID,
    ]


def test_calls_and_results_become_those_of_a_chat() -> None:
    answer = assistant(thought("Hm."), {"type": "redacted_thinking", "data": "x"}, text("Both."), use("a", at="sea"))
    given = [SAID, answer, assistant(use("b")), user(result("b", [text("1"), text("2")])), user(result("a"), text("?"))]
    assert chat(*given) == [
        SAID,
        {
            "role": "assistant",
            "content": "Both.",
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}},
                {"id": "b", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "1\n2", "tool_call_id": "b"},
        {"role": "tool", "content": "ship", "tool_call_id": "a"},
        {"role": "user", "content": "?"},
    ]


def test_a_failed_call_says_so() -> None:
    given = [SAID, assistant(use("a"), use("b")), user(result("a", "no", is_error=True), result("b", None))]
    assert [one["content"] for one in chat(*given)[2:]] == ["Error: no", ""]


def test_ids_can_return_in_a_later_turn() -> None:
    turn = [assistant(use("a")), user(result("a"))]
    assert len(chat(SAID, *turn, *turn)) == 5


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("all", ["1", "2", "3"]),
        ({"type": "all"}, ["1", "2", "3"]),
        ({"type": "thinking_turns", "value": 2}, [None, "2", "3"]),
        (None, [None, None, "3"]),
    ],
)
def test_thoughts_of_early_turns_can_be_cleared(keep: Any, kept: list[str | None]) -> None:
    turns = [one for said in "123" for one in (assistant(thought(said), text("x")), SAID)]
    edit = {"type": "clear_thinking_20251015", "keep": keep}
    answers = [one for one in chat(SAID, *turns, context_management={"edits": [edit]}) if one["role"] == "assistant"]
    assert [one.get("reasoning") for one in answers] == kept


def test_a_last_message_of_the_assistant_begins_the_answer() -> None:
    assert converted(SAID, assistant(text("Yes"))).continues_answer
    assert not converted(SAID).continues_answer
    empty = converted(SAID, {"role": "assistant", "content": ""})
    assert (empty.continues_answer, len(empty.messages)) == (False, 1)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([SAID, assistant(use("a"))], "messages[1].content[0]"),
        ([SAID, assistant(text("x"), use("a")), SAID], "messages[1].content[1]"),
        ([SAID, assistant(use("a"), use("b")), user(result("a"))], "messages[1].content[1]"),
        ([SAID, assistant(use("a")), user(result("a")), user(result("a"))], "messages[3].content[0].tool_use_id"),
        ([SAID, assistant(use("a")), user(result("b"))], "messages[2].content[0].tool_use_id"),
        ([user(result("a"))], "messages[0].content[0].tool_use_id"),
        ([SAID, assistant(use("a")), user(text("x"), result("a"))], "messages[2].content[1]"),
        ([SAID, assistant(use("a")), SAID, user(result("a"))], "messages[3].content[0]"),
        ([SAID, assistant(use("a"), use("a")), user(result("a"))], "messages[1].content[1].id"),
        ([user(use("a"))], "messages[0].content[0].type"),
        ([{"role": "system", "content": [thought("x")]}, SAID], "messages[0].content[0].type"),
        ([SAID, {"role": "system", "content": [text("x"), result("a")]}], "messages[1].content[1].type"),
        ([user(thought("x"))], "messages[0].content[0].type"),
        ([SAID, assistant(result("a"))], "messages[1].content[0].type"),
    ],
)
def test_a_conversation_that_does_not_fit_together_is_refused(messages: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        converted(*messages)
    assert refused.value.field == field
    assert str(refused.value).startswith(field)
