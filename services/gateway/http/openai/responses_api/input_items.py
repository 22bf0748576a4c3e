"""Converts the input of /v1/responses to the messages of a chat."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from services.gateway.http.message_origins import MessageOrigin, place_of
from services.gateway.http.openai import requests
from services.gateway.http.openai.field_names import FieldNames
from services.gateway.http.openai.responses_api.custom_input import arguments_of
from services.gateway.http.openai.responses_api.item_schemas import (
    CopiedItem,
    InputCall,
    InputCallResult,
    InputCustomCall,
    InputFunctionCall,
    InputItem,
    InputMessage,
    InputReasoning,
    InputSearch,
    InputShellCall,
    InputShellResult,
    InputText,
)
from services.gateway.http.openai.responses_api.request_schemas import ResponsesRequest
from services.gateway.http.openai.responses_api.response_tools import DeclaredTool, ResponseTools, name_for_model
from services.gateway.http.thought_carrier import thought_of
from services.runtime.errors import InvalidField

_CHAT = TypeAdapter(list[requests.ChatMessage])
_MESSAGES = "input.messages"
_SHELL = "local_shell"
_IN_MESSAGE = re.compile(
    r"\b(?:input\.)?messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function\b)?(\.id\b)?|(\.content\b))?"
)
_IN_TOOL = re.compile(
    r"(?<![\w.])tools\[(\d+)\](?:\.function\b)?(?:(\.parameters\b)(: #/properties/input(?:/pattern)?(?=[:/ ]|\Z))?)?"
)
# The names of a chat's fields. Messages are renamed in a second step, because their places differ.
_NAMES = {
    "prompt.chat": "input",
    "prompt.chat.messages": _MESSAGES,
    "messages": _MESSAGES,
    "logprobs": "include",
    "stopping.max_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}

_MAX_SHOWN = 100


class CallResults:
    """The calls of one conversation, by their ids.

    Some models number their calls anew in each turn. So an id may be repeated once its call has an output.
    """

    def __init__(self) -> None:
        self._calls: dict[str, str] = {}  # the place of the last call of each id
        self._results: dict[str, str] = {}  # the place of its output
        self._items: dict[str, str] = {}  # the places of items by their ids

    def add_item(self, item_id: str | None, path: str) -> None:
        """Add an item. Raises InvalidField if another one has its id."""
        if not item_id:
            return
        if item_id in self._items:
            message = f"Duplicate item found with id {item_id[:_MAX_SHOWN]}. Remove duplicate items from your input and"
            same = f"{path}.id is that of {self._items[item_id]}"
            raise InvalidField(f"{message} try again: {same}", f"{path}.id")
        self._items[item_id] = path

    def add_call(self, call_id: str, path: str) -> None:
        """Add a call. Raises InvalidField if one of the same id waits for its output."""
        if call_id in self._calls and call_id not in self._results:
            earlier = self._calls[call_id]
            raise InvalidField(f"{path}.call_id is that of {earlier}, which has no output before it", f"{path}.call_id")
        self._calls[call_id] = path
        self._results.pop(call_id, None)

    def add_result(self, call_id: str, path: str) -> None:
        """Add an output. Raises InvalidField without a call that waits for it."""
        if call_id not in self._calls:
            raise InvalidField(f"{path}.call_id must be that of an earlier call", f"{path}.call_id")
        if call_id in self._results:
            raise InvalidField(
                f"{path}.call_id must be that of a call without an output: {self._results[call_id]} is one",
                f"{path}.call_id",
            )
        self._results[call_id] = path

    def check(self) -> None:
        """Raise InvalidField if a call has no output."""
        for call_id, path in self._calls.items():
            if call_id not in self._results:
                missing = f"No tool output found for function call {call_id[:_MAX_SHOWN]}."
                raise InvalidField(f"{missing} It is {path}, and no item after it has its call_id.", "input")


class InputConversation:
    """The conversation of a request, as messages of a chat with their places in the body."""

    def __init__(self, body: ResponsesRequest) -> None:
        """Convert the instructions and the input. Raises InvalidField."""
        self.origins: list[MessageOrigin] = []
        self.warnings: list[str] = []
        self._messages: list[dict[str, Any]] = []
        self._results = CallResults()
        self._callers: dict[str, int] = {}  # the message of each call, by its id
        self._behind: dict[int, list[tuple[dict[str, Any], MessageOrigin]]] = {}  # results of the calls of a message
        self._thought = ""  # of the next message or call of the assistant
        if body.instructions is not None:
            self._add("system", body.instructions, MessageOrigin("instructions", "instructions"))
        if isinstance(body.input, str):
            self._add("user", body.input, MessageOrigin("input", "input"))
        else:
            self._add_items(body.input)
        self.messages = _CHAT.validate_python(self._with_results())

    def _add_items(self, items: Sequence[InputItem]) -> None:
        for at, item in enumerate(items):
            path = f"input[{at}]"
            if isinstance(item, CopiedItem):
                self._results.add_item(item.id, path)
            if isinstance(item, InputMessage):
                self._add_message(item, path)
            elif isinstance(item, InputReasoning):
                self._thought = _joined(self._thought, _thought(item))
            elif isinstance(item, InputCallResult | InputShellResult):
                self._add_result(item, path)
            elif isinstance(item, InputSearch):
                self.warnings.append(f"{path} ({item.type}) is left out of the conversation")
            elif isinstance(item, InputCall | InputShellCall):
                self._add_call(item, path)
        self._results.check()

    def _add_message(self, item: InputMessage, path: str) -> None:
        """Add a message. The assistant's text behind its calls belongs to their message: templates have it there."""
        origin = MessageOrigin(path, f"{path}.content")
        if item.role != "assistant" or not self._is_answering() or "tool_calls" not in self._messages[-1]:
            self._add(item.role, item.content, origin)
            return
        message = self._messages[-1]
        message["content"] = _parts(message["content"]) + _parts(_content(item.content))
        self._add_thought()
        self.origins[-1] = replace(self.origins[-1], content=origin.content)

    def _add_call(self, item: InputCall | InputShellCall, path: str) -> None:
        """Add a call to the assistant's message before it, or to a new one."""
        call = _call(item, path)
        self._results.add_call(call["id"], path)
        if not self._is_answering():
            self._add("assistant", None, MessageOrigin(path, path))
        self._add_thought()
        self._messages[-1].setdefault("tool_calls", []).append(call)
        self._callers[call["id"]] = len(self._messages) - 1
        self.origins[-1].calls.append(path)

    def _add_thought(self) -> None:
        """Add a thought to the last message."""
        thought, self._thought = self._thought, ""
        if thought:
            self._messages[-1]["reasoning"] = _joined(self._messages[-1].get("reasoning", ""), thought)

    def _add_result(self, item: InputCallResult | InputShellResult, path: str) -> None:
        call_id = item.call_id or item.id or ""
        self._results.add_result(call_id, path)
        message = {"role": "tool", "content": _content(item.output), "tool_call_id": call_id}
        result = message, MessageOrigin(path, f"{path}.output")
        self._behind.setdefault(self._callers[call_id], []).append(result)

    def _is_answering(self) -> bool:
        """Return whether the last message is the assistant's, and no result of its calls has come."""
        last = len(self._messages) - 1
        return last >= 0 and self._messages[last]["role"] == "assistant" and last not in self._behind

    def _with_results(self) -> list[dict[str, Any]]:
        """Return the messages, with results behind their calls, and set the origins in the same order.

        Other items may stand between a call and its result, but other messages of a chat may not.
        """
        ordered = []
        for at, message in enumerate(zip(self._messages, self.origins, strict=True)):
            ordered += [message, *self._behind.get(at, ())]
        self.origins = [origin for _, origin in ordered]
        return [message for message, _ in ordered]

    def _add(self, role: str, content: str | list[InputText] | None, origin: MessageOrigin, **fields: str) -> None:
        thought, self._thought = self._thought, ""
        if thought and role == "assistant":
            fields["reasoning"] = thought
        self._messages.append({"role": role, "content": _content(content), **fields})
        self.origins.append(origin)


@dataclass(frozen=True)
class InputFieldNames(FieldNames):
    """The names of one request's fields: those of a chat, with the place of each message in the input."""

    origins: Sequence[MessageOrigin] = ()
    tools: Sequence[DeclaredTool] = ()

    @classmethod
    def of(cls, conversation: InputConversation, tools: ResponseTools, names: FieldNames) -> "InputFieldNames":
        """Return the names of a request; `names` are those of its chat."""
        renamed = {path: _NAMES.get(name, name) for path, name in names.overrides.items()}
        return cls({**renamed, **_NAMES}, names.constraint_tools, conversation.origins, tools.offered)

    def http_name(self, path: str) -> str:
        """See FieldNames."""
        return self._in_input(super().http_name(path))

    def translate(self, message: str) -> str:
        """See FieldNames."""
        return self._in_input(super().translate(message))

    def _in_input(self, text: str) -> str:
        return _IN_TOOL.sub(self._tool, _IN_MESSAGE.sub(self._place, text)).replace(_MESSAGES, "input")

    def _tool(self, match: re.Match[str]) -> str:
        tool, schema, of_input = match.groups()
        if int(tool) >= len(self.tools):
            return match[0].replace(".function", "")
        declared = self.tools[int(tool)]
        if schema:
            return declared.schema_path + ("" if declared.is_custom else of_input or "")
        return declared.path

    def _place(self, match: re.Match[str]) -> str:
        message, call, call_id, content = match.groups()
        place = place_of(self.origins, message, call, content)
        return f"{place}.call_id" if place and call_id else place or match[0]


def _content(content: str | list[InputText] | None) -> str | list[dict[str, str]] | None:
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _parts(content: str | list[dict[str, str]] | None) -> list[dict[str, str]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _call(item: InputCall | InputShellCall, path: str) -> dict[str, Any]:
    """Return the tool call of a chat."""
    if isinstance(item, InputShellCall):
        call_id, name = item.call_id or item.id, _SHELL
        if not call_id:
            raise InvalidField(f"{path}.call_id is missing", f"{path}.call_id")
        return {"id": call_id, "function": {"name": name, "arguments": json.dumps(item.action, ensure_ascii=False)}}
    arguments = ""
    if isinstance(item, InputCustomCall):
        arguments = arguments_of(item.input)
    elif isinstance(item, InputFunctionCall):
        arguments = item.arguments
    return {
        "id": item.call_id,
        "function": {"name": name_for_model(item.name, item.namespace), "arguments": arguments},
    }


def _thought(item: InputReasoning) -> str:
    """Return the text of a thought, from where the client kept it."""
    return "\n".join(part.text for part in item.content or ()) or thought_of(item.encrypted_content)


def _joined(first: str, second: str) -> str:
    return f"{first}\n{second}" if first and second else first or second
