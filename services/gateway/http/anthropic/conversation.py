"""Converts the conversation of /v1/messages to the messages of a chat."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from services.gateway.http.anthropic.block_schemas import (
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from services.gateway.http.anthropic.request_schemas import ContextManagement, Message, MessageFields
from services.gateway.http.openai import requests
from services.gateway.http.openai.responses_api.input_items import MessageOrigin
from services.runtime.errors import InvalidField
from services.runtime.http.validation import shown

_SAID = (TextBlock, ThinkingBlock, RedactedThinkingBlock)
_CHAT = TypeAdapter(list[requests.ChatMessage])
# Claude Code's first system block describes the client. It changes with every request, and so would the whole prompt.
_BILLING = "x-anthropic-billing-header:"


@dataclass
class _Turn:
    """Messages of one author behind each other: their blocks, with the place of each in the body."""

    role: str
    path: str
    blocks: list[tuple[Any, str]] = field(default_factory=list)

    def texts(self) -> list[str]:
        """The texts of the turn."""
        return [block.text for block, _ in self.blocks if isinstance(block, TextBlock)]

    def thoughts(self) -> list[str]:
        """The thoughts of the turn."""
        return [block.thinking for block, _ in self.blocks if isinstance(block, ThinkingBlock) and block.thinking]


class Conversation:
    """The conversation of a request, as messages of a chat with their places in the body."""

    def __init__(self, body: MessageFields) -> None:
        """Convert the system message and the messages. Raises InvalidField."""
        self.origins: list[MessageOrigin] = []
        self._messages: list[dict[str, Any]] = []
        self._calls: dict[str, str] = {}  # those of the turn before, which need results: places by id
        leading = _leading_system_messages(body.messages)
        if system := [*_system_texts(body.system), *(text for one in leading for text in _texts_of(one))]:
            place = "messages[0]" if body.system is None else "system"
            self._add("system", "\n".join(system), MessageOrigin(place, place))
        turns = list(_turns(body.messages, len(leading)))
        _clear_thoughts(turns, body.context_management)
        self.continues_answer = bool(turns) and turns[-1].role == "assistant" and self._is_prefill(turns)
        for turn in turns:
            if turn.role == "assistant":
                self._add_answer(turn)
            else:
                self._add_user_turn(turn)
        self._check_all_have_results()
        self.messages = _CHAT.validate_python(self._messages)

    @staticmethod
    def _is_prefill(turns: list[_Turn]) -> bool:
        """Return whether the last turn begins the answer; remove one that is empty."""
        last = turns[-1]
        is_plain = all(isinstance(block, _SAID) for block, _ in last.blocks)
        if not is_plain or any((*last.texts(), *last.thoughts())):
            return True
        turns.pop()
        return False

    def _add_answer(self, turn: _Turn) -> None:
        self._check_all_have_results()
        for block, path in turn.blocks:
            if isinstance(block, ToolResultBlock):
                raise InvalidField(f"{path}.type must not be 'tool_result' in an assistant's message", f"{path}.type")
        calls, texts, thoughts = _calls_of(turn), turn.texts(), turn.thoughts()
        fields: dict[str, Any] = {"reasoning": "\n".join(thoughts)} if thoughts else {}
        if calls:
            fields["tool_calls"] = [_call(block) for block, _ in calls]
        content = None if calls and not texts else "\n".join(texts)
        paths = [path for _, path in calls]
        self._add("assistant", content, MessageOrigin(turn.path, f"{turn.path}.content", paths), **fields)
        for block, path in calls:
            if block.id in self._calls:
                raise InvalidField(f"{path}.id must differ from that of {self._calls[block.id]}", f"{path}.id")
            self._calls[block.id] = path

    def _add_user_turn(self, turn: _Turn) -> None:
        calls, texts = dict(self._calls), list[str]()
        for block, path in turn.blocks:
            if isinstance(block, ToolResultBlock):
                if texts:
                    raise InvalidField(f"{path} must stand in front of other blocks: it is a tool_result", path)
                self._add_result(block, path, calls)
            elif isinstance(block, TextBlock):
                texts.append(block.text)
            else:
                raise InvalidField(f"{path}.type must not be {block.type!r} in a user's message", f"{path}.type")
        self._check_all_have_results()
        if texts:
            self._add("user", "\n".join(texts), MessageOrigin(turn.path, f"{turn.path}.content"))

    def _add_result(self, block: ToolResultBlock, path: str, calls: dict[str, str]) -> None:
        """Add the result of one of the calls in the turn before."""
        if self._calls.pop(block.tool_use_id, None) is None:
            place, given = f"{path}.tool_use_id", shown(block.tool_use_id)
            fault = (
                "has two results" if block.tool_use_id in calls else "is the id of no tool_use in the message before"
            )
            raise InvalidField(f"{place} {given} {fault}", place)
        text = _result_text(block)
        self._add("tool", text, MessageOrigin(path, f"{path}.content"), tool_call_id=block.tool_use_id)

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
    return [text for text in texts if not text.startswith(_BILLING)]


def _leading_system_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of the system before any other."""
    first = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
    return list(messages[:first])


def _texts_of(message: Message) -> list[str]:
    if isinstance(message.content, str):
        return [message.content]
    return [block.text for block in _only_texts(message.content)]


def _turns(messages: Sequence[Message], first: int) -> Iterator[_Turn]:
    """Yield the turns of a conversation from a message on.

    A message of the system is a part of the user's turn, because most chat templates have its role only at the start.
    """
    turn: _Turn | None = None
    for at, message in enumerate(messages[first:], first):
        role = "user" if message.role == "system" else message.role
        if turn is None or turn.role != role:
            if turn is not None:
                yield turn
            turn = _Turn(role, f"messages[{at}]")
        turn.blocks += _blocks(message, f"messages[{at}]")
    if turn is not None:
        yield turn


def _blocks(message: Message, path: str) -> Iterator[tuple[Any, str]]:
    if message.role == "system":
        text = "\n".join(_texts_of(message))
        yield TextBlock.model_construct(type="text", text=f"<system>\n{text}\n</system>"), f"{path}.content"
    elif isinstance(message.content, str):
        yield TextBlock.model_construct(type="text", text=message.content), f"{path}.content"
    else:
        for at, block in enumerate(message.content):
            yield block, f"{path}.content[{at}]"


def _calls_of(turn: _Turn) -> list[tuple[ToolUseBlock, str]]:
    return [(block, path) for block, path in turn.blocks if isinstance(block, ToolUseBlock)]


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "function": {"name": block.name, "arguments": arguments}}


def _result_text(block: ToolResultBlock) -> str:
    content = block.content or ""
    text = content if isinstance(content, str) else "\n".join(part.text for part in _only_texts(content))
    return f"Error: {text}" if block.is_error else text


def _only_texts(blocks: Sequence[Any]) -> list[TextBlock]:
    return [block for block in blocks if isinstance(block, TextBlock)]


def _clear_thoughts(turns: Sequence[_Turn], management: ContextManagement | None) -> None:
    """Remove the thoughts of the turns that keep none."""
    for edit in (management and management.edits) or ():
        keep = edit.keep
        if keep == "all" or (keep is not None and not isinstance(keep, str) and keep.type == "all"):
            continue
        kept = 1 if keep is None or isinstance(keep, str) or keep.value is None else keep.value
        thinking = [turn for turn in turns if turn.thoughts()]
        for turn in thinking[:-kept]:
            turn.blocks = [one for one in turn.blocks if not isinstance(one[0], ThinkingBlock)]
