"""Writes tools, calls and results as plain messages, for chat templates that render none of them.

Schemas stand between `<tools>` tags in the system message, results between `<tool_response>` tags in a turn of the
user, as in the prompts of the Hermes models, which many models have learned. Calls are in the form of the model.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from services.gateway.dialects.declarations import DEFAULT_CALLS
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


def with_tool_prompt(conversation: Conversation, calls: CallFormat, *, system_role: bool) -> Conversation:
    """Return the conversation without tools, as plain messages, with calls in a format.

    Without a `system_role`, the description of the tools begins the first message.
    """
    messages = [*_plain_messages(conversation.messages, calls)]
    if conversation.tools:
        description = _description(conversation.tools, calls)
        messages = _described(messages, description, system_role=system_role)
    return conversation._replace(messages=messages, tools=())


def with_description(conversation: Conversation, calls: CallFormat, *, system_role: bool) -> Conversation:
    """Return the conversation with a description of its tools, for a template that writes calls and results itself."""
    if not conversation.tools:
        return conversation
    description = _description(conversation.tools, calls)
    messages = _described([*conversation.messages], description, system_role=system_role)
    return conversation._replace(messages=messages)


def _plain_messages(messages: Sequence[_Message], calls: CallFormat) -> Iterator[_Message]:
    """Yield messages without calls; results that follow each other are one turn of the user."""
    for role, group in groupby(messages, key=itemgetter("role")):
        if role == "tool":
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            yield {"role": "user", "content": "\n".join(results)}
        else:
            yield from (_without_calls(message, calls) for message in group)


def _without_calls(message: _Message, calls: CallFormat) -> _Message:
    if "tool_calls" not in message:
        return message
    written = calls.section([_call(call["function"], calls) for call in message["tool_calls"]])
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return plain | {"content": "\n".join([*filter(None, [message.get("content")]), written])}


def _call(function: Mapping[str, Any], calls: CallFormat) -> str:
    """Write a call. Arguments that are no object can only stand where JSON does."""
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return f'{{"name": {_json(function["name"])}, "arguments": {arguments}}}'
    return calls.form.written(WrittenCall(function["name"], _json(arguments)))


def _description(tools: Sequence[Mapping[str, Any]], calls: CallFormat) -> str:
    listed = "\n".join(map(_json, tools))
    if calls is DEFAULT_CALLS:
        return _INSTRUCTIONS.format(tools=listed)
    return _OTHER_INSTRUCTIONS.format(tools=listed, calls=calls.section([calls.form.written(_EXAMPLE)]))


def _described(messages: list[_Message], description: str, *, system_role: bool) -> list[_Message]:
    first, *others = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{description}"}, *others]
    if system_role:
        return [{"role": "system", "content": description}, *messages]
    return [{**first, "content": f"{description}\n\n{first['content']}"}, *others]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
