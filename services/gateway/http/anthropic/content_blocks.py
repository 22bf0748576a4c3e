"""Separates an output into blocks of content, in the order in which they are generated."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from services.gateway.dialects.events import Arguments, CallEnd, CallStart, Event, Reasoning, Text
from services.gateway.http.openai.dialect_deltas import DialectDeltas, new_call_id
from services.gateway.http.thought_carrier import carried

# Thoughts are not signed, but clients drop those without a signature from the conversation.
SIGNATURE = "cXVpcmU="
INVALID_JSON = "INVALID_JSON"


class Started(NamedTuple):
    """A block begins: its content is empty."""

    at: int
    block: dict[str, Any]


class Grown(NamedTuple):
    """The next text of a block. `kind` is the type of the event's delta."""

    at: int
    kind: str
    text: str


class Stopped(NamedTuple):
    """A block is whole."""

    at: int


Change = Started | Grown | Stopped

# The member of a delta that has its text.
DELTA_MEMBERS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


class BlockSeparator:
    """Turns the events of a dialect into changes of blocks. Without `shows_thoughts` signatures carry their texts."""

    def __init__(self, *, shows_thoughts: bool = True) -> None:
        self._hidden: list[str] | None = None if shows_thoughts else []  # the texts of the open thought
        self._index = -1
        self._open = ""  # the type of the open block

    def changes(self, events: Iterable[Event]) -> Iterator[Change]:
        """Yield the changes that events make."""
        for event in events:
            match event:
                case Text(text):
                    yield from self._continue({"type": "text", "text": ""})
                    yield Grown(self._index, "text_delta", text)
                case Reasoning(text):
                    yield from self._continue({"type": "thinking", "thinking": "", "signature": ""})
                    if self._hidden is None:
                        yield Grown(self._index, "thinking_delta", text)
                    else:
                        self._hidden.append(text)
                case CallStart(name, call_id):
                    yield from self.close()
                    yield self._start({"type": "tool_use", "id": call_id or new_call_id(), "name": name, "input": {}})
                case Arguments(text):
                    yield Grown(self._index, "input_json_delta", text)
                case CallEnd():
                    yield from self.close()

    def close(self) -> Iterator[Change]:
        """Yield the end of the open block, if there is one."""
        if self._open == "thinking":
            yield Grown(self._index, "signature_delta", self._signature())
        if self._open:
            yield Stopped(self._index)
        self._open = ""

    def _signature(self) -> str:
        if self._hidden is None:
            return SIGNATURE
        thought = "".join(self._hidden)
        self._hidden.clear()
        return carried(thought)

    def _continue(self, block: dict[str, Any]) -> Iterator[Change]:
        """Begin a block unless one of its type is open."""
        if self._open != block["type"]:
            yield from self.close()
            yield self._start(block)

    def _start(self, block: dict[str, Any]) -> Started:
        self._open = block["type"]
        self._index += 1
        return Started(self._index, block)


def whole_blocks(changes: Iterable[Change]) -> list[dict[str, Any]]:
    """Return the blocks that changes make up."""
    blocks: list[dict[str, Any]] = []
    arguments: list[str] = []
    for change in changes:
        match change:
            case Started(_, block):
                blocks.append(block)
                arguments.clear()
            case Grown(_, "input_json_delta", text):
                arguments.append(text)
            case Grown(_, kind, text):
                blocks[-1][DELTA_MEMBERS[kind]] += text
            case Stopped():
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = _input("".join(arguments))
    return blocks


def _input(text: str) -> dict[str, Any]:
    """Return the arguments of a call. Text that is no JSON object, which a model may write, is kept under a name.

    So is JSON that an answer cannot have: numbers that are not finite, and half surrogate pairs.
    """
    try:
        value = json.loads(text or "{}")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}


class OutputEvents:
    """Reads the output of one sample as events of a dialect. `deltas` separates them; None if all of it is text."""

    def __init__(self, deltas: DialectDeltas | None) -> None:
        self._deltas = deltas

    def read(self, text: str, token_ids: Sequence[int]) -> Sequence[Event]:
        """Add generated text and its tokens; return the events that are final."""
        if self._deltas is not None:
            return self._deltas.events(text, token_ids)
        return [Text(text)] if text else []

    def rest(self) -> Sequence[Event]:
        """Return the events held back after the last text."""
        return self._deltas.rest_of_events() if self._deltas is not None else []

    @property
    def called(self) -> bool:
        """Whether the output ends with calls, and not within one."""
        return self._deltas is not None and self._deltas.called

    @property
    def thought_tokens(self) -> int:
        """Number of tokens of thoughts."""
        return self._deltas.reasoning_tokens if self._deltas is not None else 0
