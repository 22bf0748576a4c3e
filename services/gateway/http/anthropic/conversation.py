"""Converts the conversation of /v1/messages to the messages of a chat."""

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from services.gateway.http.anthropic.block_schemas import TextBlock, ToolResultBlock, ToolUseBlock
from services.gateway.http.anthropic.request_schemas import MessageFields
from services.gateway.http.anthropic.turns import SystemText, Turn, clear_thoughts, leading_system_texts, turns_of
from services.gateway.http.message_origins import MessageOrigin
from services.gateway.http.openai import requests
from services.runtime.errors import InvalidField
from services.runtime.http.validation import shown

_CHAT = TypeAdapter(list[requests.ChatMessage])
# Claude Code begins the system message with a line about itself. It changes with every request: no prefix was cached.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


class MessageConversation:
    """The conversation of a request, as messages of a chat with their places in the body.

    `continues_answer`: the last message begins the answer.
    """

    def __init__(self, body: MessageFields) -> None:
        """Convert the system message and the messages. Raises InvalidField."""
        self.origins: list[MessageOrigin] = []
        self._messages: list[dict[str, Any]] = []
        self._calls: dict[str, str] = {}  # those of the turn before that have no result: places by id
        leading = leading_system_texts(body.messages)
        if system := [*_system_texts(body.system), *leading]:
            place = "messages[0]" if body.system is None else "system"
            self._add("system", "\n".join(system), MessageOrigin(place, place))
        turns = turns_of(body.messages, len(leading))
        clear_thoughts(turns, body.context_management)
        if turns and turns[-1].role == "assistant" and turns[-1].is_empty:
            turns.pop()
        self.continues_answer = bool(turns) and turns[-1].role == "assistant"
        for turn in turns:
            if turn.role == "assistant":
                self._add_answer(turn)
            else:
                self._add_user_turn(turn)
        self._check_all_have_results()
        self.messages = _CHAT.validate_python(self._messages)

    def _add_answer(self, turn: Turn) -> None:
        for block, path in turn.blocks:
            if isinstance(block, ToolResultBlock):
                raise InvalidField(f"{path}.type must not be 'tool_result' in an assistant's message", f"{path}.type")
        fields: dict[str, Any] = {"reasoning": "\n".join(turn.thoughts)} if turn.thoughts else {}
        if calls := turn.calls:
            fields["tool_calls"] = [_call(block) for block, _ in calls]
        content = None if calls and not turn.texts else "\n".join(turn.texts)
        origin = MessageOrigin(turn.path, f"{turn.path}.content", [path for _, path in calls])
        self._add("assistant", content, origin, **fields)
        for block, path in calls:
            if block.id in self._calls:
                raise InvalidField(f"{path}.id must differ from that of {self._calls[block.id]}", f"{path}.id")
            self._calls[block.id] = path

    def _add_user_turn(self, turn: Turn) -> None:
        calls, has_text = set(self._calls), False
        for block, path in turn.blocks:
            if isinstance(block, ToolResultBlock):
                if has_text:
                    raise InvalidField(f"{path} must stand in front of other blocks: it is a tool_result", path)
                self._add_result(block, path, calls)
            elif not isinstance(block, TextBlock | SystemText):
                raise InvalidField(f"{path}.type must not be {block.type!r} in a user's message", f"{path}.type")
            else:
                has_text |= isinstance(block, TextBlock)
        self._check_all_have_results()
        if turn.texts:
            self._add("user", "\n".join(turn.texts), MessageOrigin(turn.path, f"{turn.path}.content"))

    def _add_result(self, block: ToolResultBlock, path: str, calls: set[str]) -> None:
        """Add the result of one of the calls in the turn before."""
        call_id = block.tool_use_id
        if self._calls.pop(call_id, None) is None:
            place = f"{path}.tool_use_id"
            fault = "has two results" if call_id in calls else "is the id of no tool_use in the message before"
            raise InvalidField(f"{place} {shown(call_id)} {fault}", place)
        self._add("tool", _result_text(block), MessageOrigin(path, f"{path}.content"), tool_call_id=call_id)

    def _check_all_have_results(self) -> None:
        for call_id, path in self._calls.items():
            fault = f"tool_use {shown(call_id)} has no tool_result in the next message"
            raise InvalidField(f"{path}: {fault}; each tool_use must have one there", path)

    def _add(self, role: str, content: str | None, origin: MessageOrigin, **fields: Any) -> None:
        self._messages.append({"role": role, "content": content, **fields})
        self.origins.append(origin)


def _system_texts(system: str | Sequence[TextBlock] | None) -> list[str]:
    """Return the texts of the system message, without what Claude Code says there to its provider."""
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return [rest for text in texts if (rest := _BILLING.sub("", text)) or not text]


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "function": {"name": block.name, "arguments": arguments}}


def _result_text(block: ToolResultBlock) -> str:
    content = block.content or ""
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content if isinstance(part, TextBlock))
    return f"Error: {content}" if block.is_error else content
