"""Calls of tools in what a model says.

Each family of models writes them in a way of its own, which its chat template shows:

TAGGED    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and Hermes do; text may stand around them
MARKED    `[TOOL_CALLS]` and then a list of such objects, or `name{...}` for each, as Mistral's models do
BARE      the whole answer is an object with `name` and `parameters`, or several of them, as Llama 3 does
"""

import json
import re
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARK = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_FIRST_KEYS = ('"name"', '"type"')
_NAME_BEFORE_ARGUMENTS = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\]\s*)?(?=\{)")
_BETWEEN = re.compile(r"[\s;,]*")
_BLANKS = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


class Called(NamedTuple):
    """A call of a tool: its name, and its arguments as JSON text."""

    name: str
    arguments: str


class Opened(NamedTuple):
    """A call of a tool whose arguments follow, as text in pieces."""

    name: str


class ArgumentsPart(NamedTuple):
    """More of the arguments of the call that was opened."""

    text: str


Piece = str | Called | Opened | ArgumentsPart


class ToolFormat(Enum):
    """How a model writes its calls."""

    TAGGED = _OPEN
    MARKED = _MARK
    BARE = ""

    @classmethod
    def of(cls, template: str) -> "ToolFormat":
        """Return the format that a chat template shows."""
        return next(kind for kind in cls if kind.value in template)

    @property
    def mark(self) -> str:
        """What begins a call, and may be a special token."""
        return self.value or _PYTHON_TAG


class ToolCallReader(Protocol):
    """Takes an answer apart while it comes: text as it is, and calls."""

    def push(self, text: str) -> list[Piece]:
        """Take more of the answer; return what is certain now. Text that could become a call waits."""

    def finish(self) -> list[Piece]:
        """Return what was held back: no more comes. What turned out to be no call is text."""


def reader_of(kind: ToolFormat) -> ToolCallReader:
    """Make the reader of a model's own format."""
    makers: dict[ToolFormat, Callable[[], ToolCallReader]] = {
        ToolFormat.TAGGED: TaggedCalls,
        ToolFormat.MARKED: MarkedCalls,
        ToolFormat.BARE: BareCalls,
    }
    return makers[kind]()


class TaggedCalls:
    """Calls between tags, and text around them. Blanks between calls are nothing."""

    def __init__(self) -> None:
        self._held = ""
        self._in_call = False
        self._after_call = False

    def push(self, text: str) -> list[Piece]:
        """See ToolCallReader."""
        self._held += text
        pieces: list[Piece] = []
        while (end := self._held.find(_CLOSE if self._in_call else _OPEN)) >= 0:
            before = self._held[:end]
            self._held = self._held[end + len(_CLOSE if self._in_call else _OPEN) :]
            pieces += self._calls(before, _CLOSE) if self._in_call else self._text(before)
            self._in_call = not self._in_call
        if not self._in_call:
            sure = len(self._held) - _overlap(self._held, _OPEN)
            pieces += self._text(self._held[:sure])
            self._held = self._held[sure:]
        return pieces

    def finish(self) -> list[Piece]:
        """See ToolCallReader."""
        return self._calls(self._held, "") if self._in_call else self._text(self._held)

    def _text(self, text: str) -> list[Piece]:
        if self._after_call:
            text = text.lstrip()
        self._after_call = self._after_call and not text
        return [text] if text else []

    def _calls(self, body: str, close: str) -> list[Piece]:
        calls = calls_in(body)
        if not calls:
            return [_OPEN + body + close]
        self._after_call = True
        return [*calls]


class MarkedCalls:
    """Text, and then calls to the end."""

    def __init__(self) -> None:
        self._held = ""
        self._marked = False

    def push(self, text: str) -> list[Piece]:
        """See ToolCallReader."""
        self._held += text
        if self._marked:
            return []
        start = self._held.find(_MARK)
        self._marked = start >= 0
        sure = start if self._marked else len(self._held) - _overlap(self._held, _MARK)
        text, self._held = self._held[:sure], self._held[sure:]
        return [text] if text else []

    def finish(self) -> list[Piece]:
        """See ToolCallReader."""
        if not self._held:
            return []
        calls = [call for part in self._held.split(_MARK)[1:] for call in calls_in(part)] if self._marked else []
        return [*calls] if calls else [self._held]


class BareCalls:
    """Calls and nothing else, or text and nothing else; the beginning tells."""

    def __init__(self) -> None:
        self._held: str | None = ""  # None: it is text

    def push(self, text: str) -> list[Piece]:
        """See ToolCallReader."""
        if self._held is None:
            return [text] if text else []
        self._held += text
        if _could_be_calls(self._held):
            return []
        text, self._held = self._held, None
        return [text]

    def finish(self) -> list[Piece]:
        """See ToolCallReader."""
        if not self._held:
            return []
        calls = calls_in(self._held.strip().removeprefix(_PYTHON_TAG))
        return [*calls] if calls else [self._held]


class ListedCalls:
    """A list of calls as JSON, or one alone, and nothing else: what a constraint makes sure of."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """See ToolCallReader."""
        self._held += text
        pieces: list[Piece] = []
        while "}" in text:
            start = self._held.find("{")
            try:
                value, end = _DECODER.raw_decode(self._held, start)
            except ValueError:
                break
            self._held = self._held[end:]
            pieces.append(_called(value) or json.dumps(value))
            text = self._held
        return pieces

    def finish(self) -> list[Piece]:
        """See ToolCallReader."""
        rest = self._held.strip(" \t\r\n[],")
        return [rest] if rest else []


class ArgumentsOnly:
    """The arguments of one tool as JSON, and nothing else: what a constraint makes sure of."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._opened = False

    def push(self, text: str) -> list[Piece]:
        """See ToolCallReader."""
        if not text:
            return []
        begun, self._opened = self._opened, True
        return [ArgumentsPart(text)] if begun else [Opened(self._name), ArgumentsPart(text)]

    def finish(self) -> list[Piece]:
        """See ToolCallReader."""
        return []


def calls_in(text: str) -> list[Called]:
    """Return the calls that a text consists of; none when there is anything else in it."""
    return [*(_calls_or_none(text) or ())]


def _calls_or_none(text: str) -> list[Called] | None:
    calls: list[Called] = []
    position = _BETWEEN.match(text).end()  # type: ignore[union-attr]  # it matches nothing as well
    while position < len(text):
        named = _NAME_BEFORE_ARGUMENTS.match(text, position)
        try:
            value, position = _DECODER.raw_decode(text, named.end() if named else position)
        except (ValueError, RecursionError):
            return None
        found = [{"name": named[1], "arguments": value}] if named else value if isinstance(value, list) else [value]
        called = [_called(one) for one in found]
        if None in called:
            return None
        calls += [one for one in called if one is not None]
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
    return calls


def _called(value: Any) -> Called | None:
    """Read one object; Llama 3 calls arguments parameters."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some write them as JSON once more
        arguments = _object_in(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return Called(name, json.dumps(arguments, ensure_ascii=False))


def _object_in(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _could_be_calls(text: str) -> bool:
    """Whether an answer that begins so can be calls and nothing else."""
    begun = text.lstrip()
    if _PYTHON_TAG.startswith(begun[: len(_PYTHON_TAG)]):
        return True
    if not begun.startswith("{"):
        return False
    key = begun[_BLANKS.match(begun, 1).end() :]  # type: ignore[union-attr]
    return any(wanted.startswith(key[: len(wanted)]) for wanted in _FIRST_KEYS)


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text could be the beginning of a mark."""
    return next(length for length in range(len(mark) - 1, -1, -1) if text.endswith(mark[:length]))
