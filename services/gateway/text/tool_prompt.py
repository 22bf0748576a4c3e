"""Writes tools, calls and results as plain messages, for chat templates that render none of them.

The form is that of the Hermes models, which many models have learned: schemas between `<tools>` tags in the system
message, calls between `<tool_call>` tags, results between `<tool_response>` tags in a turn of the user.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from services.gateway.dialects.dialect import CallFormat
from services.gateway.dialects.forms.call_form import WrittenCall
from services.gateway.text.chat_template import Conversation

_OTHER_INSTRUCTIONS = """\
# Tools

You can call functions to help with the request of the user. Their signatures are JSON objects between <tools> tags:
<tools>
{tools}
</tools>

To call functions, write exactly in this form:
{calls}

If no function helps, answer the user directly."""
_EXAMPLE = WrittenCall("<function-name>", '{"<argument-name>": "<argument-value>"}')

_INSTRUCTIONS = """\
# Tools

You can call functions to help with the request of the user. Their signatures are JSON objects between <tools> tags:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as one JSON object between <tool_call> tags, once for each call:
<tool_call>
{{"name": "<function-name>", "arguments": <arguments-object>}}
</tool_call>

The result of each call follows between <tool_response> tags. If no function helps, answer the user directly."""

_Message = Mapping[str, Any]


def has_tools(conversation: Conversation) -> bool:
    """Return True if a conversation has tools, calls, or results of calls."""
    return bool(conversation.tools) or any(
        message["role"] == "tool" or "tool_calls" in message for message in conversation.messages
    )


def with_tool_prompt(conversation: Conversation, *, system_role: bool) -> Conversation:
    """Return the conversation without tools, as plain messages.

    Without a `system_role`, the description of the tools begins the first message.
    """
    messages = [*_plain_messages(conversation.messages)]
    if conversation.tools:
        messages = _described(messages, _description(conversation.tools), system_role=system_role)
    return conversation._replace(messages=messages, tools=())


def with_description(conversation: Conversation, calls: CallFormat, *, system_role: bool) -> Conversation:
    """Return the conversation with a description of its tools, for a template that writes calls and results itself."""
    if not conversation.tools:
        return conversation
    example = calls.section([calls.form.written(_EXAMPLE)])
    description = _OTHER_INSTRUCTIONS.format(tools="\n".join(map(_json, conversation.tools)), calls=example)
    messages = _described([*conversation.messages], description, system_role=system_role)
    return conversation._replace(messages=messages)


def _plain_messages(messages: Sequence[_Message]) -> Iterator[_Message]:
    """Yield messages without calls; results that follow each other are one turn of the user."""
    for role, group in groupby(messages, key=itemgetter("role")):
        if role == "tool":
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            yield {"role": "user", "content": "\n".join(results)}
        else:
            yield from map(_without_calls, group)


def _without_calls(message: _Message) -> _Message:
    if "tool_calls" not in message:
        return message
    calls = [_call(call["function"]) for call in message["tool_calls"]]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return plain | {"content": "\n".join([*filter(None, [message.get("content")]), *calls])}


def _call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    written = arguments if isinstance(arguments, str) else _json(arguments)
    return f'<tool_call>\n{{"name": {_json(function["name"])}, "arguments": {written}}}\n</tool_call>'


def _description(tools: Sequence[Mapping[str, Any]]) -> str:
    return _INSTRUCTIONS.format(tools="\n".join(map(_json, tools)))


def _described(messages: list[_Message], description: str, *, system_role: bool) -> list[_Message]:
    first, *others = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{description}"}, *others]
    if system_role:
        return [{"role": "system", "content": description}, *messages]
    return [{**first, "content": f"{description}\n\n{first['content']}"}, *others]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
