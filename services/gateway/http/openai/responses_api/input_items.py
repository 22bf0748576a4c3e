"""Converts the input of /v1/responses to the messages of a chat."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from services.gateway.http.openai import requests
from services.gateway.http.openai.field_names import FieldNames
from services.gateway.http.openai.responses_api.request_schemas import (
    FunctionCallResult,
    InputFunctionCall,
    InputItem,
    InputMessage,
    InputReasoning,
    InputText,
    ResponsesRequest,
)
from services.runtime.errors import InvalidField

_CHAT = TypeAdapter(list[requests.ChatMessage])
_MESSAGES = "input.messages"
_IN_MESSAGE = re.compile(r"\b(?:input\.)?messages\[(\d+)\](?:\.tool_calls\[(\d+)\](?:\.function\b)?|(\.content\b))?")
_IN_TOOL = re.compile(r"\b(tools\[\d+\])\.function\b")
# The names of a chat's fields. Messages are renamed in a second step, because their places differ.
_NAMES = {
    "prompt.chat": "input",
    "prompt.chat.messages": _MESSAGES,
    "messages": _MESSAGES,
    "logprobs": "include",
    "stopping.max_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}


@dataclass(frozen=True)
class MessageOrigin:
    """Where the body of the request has a message: the message, its text, and its tool calls."""

    path: str
    content: str
    calls: list[str] = field(default_factory=list)


class InputConversation:
    """The conversation of a request, as messages of a chat with their places in the body."""

    def __init__(self, body: ResponsesRequest) -> None:
        """Convert the instructions and the input. Raises InvalidField."""
        self.origins: list[MessageOrigin] = []
        self._messages: list[dict[str, Any]] = []
        self._call_ids: set[str] = set()
        self._thought = ""  # of the next message of the assistant
        if body.instructions is not None:
            self._add("system", body.instructions, MessageOrigin("instructions", "instructions"))
        if isinstance(body.input, str):
            self._add("user", body.input, MessageOrigin("input", "input"))
        else:
            self._add_items(body.input)
        self.messages = _CHAT.validate_python(self._messages)

    def _add_items(self, items: Sequence[InputItem]) -> None:
        for at, item in enumerate(items):
            path = f"input[{at}]"
            if isinstance(item, InputMessage):
                self._add(item.role, item.content, MessageOrigin(path, f"{path}.content"))
            elif isinstance(item, InputFunctionCall):
                self._add_call(item, path)
            elif isinstance(item, FunctionCallResult):
                self._add_result(item, path)
            elif isinstance(item, InputReasoning):
                self._thought = "\n".join(part.text for part in item.content or ())

    def _add_call(self, item: InputFunctionCall, path: str) -> None:
        """Add a call to the assistant's message before it, or to a new one."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._add("assistant", None, MessageOrigin(path, path))
        function = {"name": item.name, "arguments": item.arguments}
        self._messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
        self.origins[-1].calls.append(path)
        self._call_ids.add(item.call_id)

    def _add_result(self, item: FunctionCallResult, path: str) -> None:
        if item.call_id not in self._call_ids:
            raise InvalidField(f"{path}.call_id must be that of an earlier function_call", f"{path}.call_id")
        self._add("tool", item.output, MessageOrigin(path, f"{path}.output"), tool_call_id=item.call_id)

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

    @classmethod
    def of(cls, conversation: InputConversation, names: FieldNames) -> "InputFieldNames":
        """Return the names of a request; `names` are those of its chat."""
        renamed = {path: _NAMES.get(name, name) for path, name in names.overrides.items()}
        return cls({**renamed, **_NAMES}, names.constraint_tools, conversation.origins)

    def http_name(self, path: str) -> str:
        """See FieldNames."""
        return self._in_input(super().http_name(path))

    def translate(self, message: str) -> str:
        """See FieldNames."""
        return self._in_input(super().translate(message))

    def _in_input(self, text: str) -> str:
        return _IN_TOOL.sub(r"\1", _IN_MESSAGE.sub(self._place, text)).replace(_MESSAGES, "input")

    def _place(self, match: re.Match[str]) -> str:
        message, call, content = match.groups()
        if int(message) >= len(self.origins):
            return match[0]
        origin = self.origins[int(message)]
        if call is not None:
            return origin.calls[int(call)] if int(call) < len(origin.calls) else match[0]
        return origin.content if content else origin.path


def _content(content: str | list[InputText] | None) -> str | list[dict[str, str]] | None:
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": part.text} for part in content]
