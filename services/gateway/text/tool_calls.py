"""Incremental parsers of tool calls in generated text.

The format depends on the model family; the chat template shows which one it is:

TAGGED    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with or without text around it (Qwen, Hermes)
MARKED    `[TOOL_CALLS]`, then a list of such objects or `name{...}` for each call (Mistral)
BARE      the whole output is an object with `name` and `parameters`, or several of them (Llama 3)

Arguments are returned as the model wrote them. What does not name an offered tool, or has no object as its arguments,
is no call: it stays text, with its marks.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from typing import Any, NamedTuple, Protocol

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ENFORCED_START = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_IN_STRING = re.compile(r'\\.|["\x00-\x1f]', re.DOTALL)
_STRUCTURE = re.compile(r'\\.|["{}\[\]\\]', re.DOTALL)
_MARK = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_FIRST_KEYS = ('"name"', '"type"')
_NAME_BEFORE_ARGUMENTS = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\]\s*)?(?=\{)")
_BETWEEN = re.compile(r"[\s;,\[\]]*")
_OBJECT_START = re.compile(r'\{\s*(?=["}])')
_COLON = re.compile(r"\s*:\s*")
_MEMBER_END = re.compile(r'\s*(?:,\s*(?=")|(?=\}))')
_BLANKS = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


class ToolCall(NamedTuple):
    """A complete tool call; `arguments` is the text of a JSON object as the model wrote it."""

    name: str
    arguments: str


class ToolCallStart(NamedTuple):
    """The start of a tool call whose arguments follow as ArgumentsDelta."""

    name: str


class ArgumentsDelta(NamedTuple):
    """The next part of the arguments of the last ToolCallStart."""

    text: str


class _Value(NamedTuple):
    """A JSON value, and its text."""

    value: Any
    text: str


_MISSING = _Value(None, "")

OutputPart = str | ToolCall | ToolCallStart | ArgumentsDelta


class ToolFormat(Enum):
    """The format in which a model writes tool calls."""

    TAGGED = _OPEN
    MARKED = _MARK
    BARE = ""

    @classmethod
    def of(cls, template: str) -> "ToolFormat":
        """Return the format that a chat template uses."""
        return next(kind for kind in cls if kind.value in template)

    @property
    def start_marker(self) -> str:
        """The text that starts a call; some models have it as a special token."""
        return self.value or _PYTHON_TAG


class ToolCallParser(Protocol):
    """Splits the output of one sample into text and tool calls while it is generated."""

    def push(self, text: str) -> list[OutputPart]:
        """Add generated text. Return the finished parts; text that could become a call is held back."""

    def finish(self) -> list[OutputPart]:
        """Return the parts held back after the last push. Text that did not become a call is plain text."""


def parser_for(kind: ToolFormat, names: Collection[str]) -> ToolCallParser:
    """Return a new parser of the model's format, for calls of the tools with these names."""
    parsers: dict[ToolFormat, Callable[[Collection[str]], ToolCallParser]] = {
        ToolFormat.TAGGED: TaggedCallParser,
        ToolFormat.MARKED: MarkedCallParser,
        ToolFormat.BARE: BareCallParser,
    }
    return parsers[kind](names)


class TaggedCallParser:
    """Parses calls between tags, with text around them. Drops whitespace after a call."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._in_call = False
        self._end = _MarkFinder(_CLOSE)
        self._after_call = False

    def push(self, text: str) -> list[OutputPart]:
        """See ToolCallParser."""
        self._held += text
        pieces: list[OutputPart] = []
        while (end := self._end.find(self._held) if self._in_call else self._held.find(_OPEN)) >= 0:
            pieces += self._pass(end)
        if not self._in_call:
            end = len(self._held) - _overlap(self._held, _OPEN)
            pieces += self._text(self._held[:end])
            self._held = self._held[end:]
        return pieces

    def finish(self) -> list[OutputPart]:
        """See ToolCallParser."""
        pieces: list[OutputPart] = []
        while self._in_call and (end := self._held.find(_CLOSE)) >= 0:  # in a string that does not end: no JSON
            pieces += self._pass(end) + self.push("")
        return pieces + (self._calls(self._held, "") if self._in_call else self._text(self._held))

    def _pass(self, end: int) -> list[OutputPart]:
        """Return the parts before the tag at `end`, and go on after it."""
        before, tag = self._held[:end], _CLOSE if self._in_call else _OPEN
        pieces = self._calls(before, _CLOSE) if self._in_call else self._text(before)
        self._held, self._in_call, self._end = self._held[end + len(tag) :], not self._in_call, _MarkFinder(_CLOSE)
        return pieces

    def _text(self, text: str) -> list[OutputPart]:
        if self._after_call:
            text = text.lstrip()
        self._after_call = self._after_call and not text
        return [text] if text else []

    def _calls(self, body: str, close: str) -> list[OutputPart]:
        calls = parse_calls(body, self._names)
        if not calls:
            return [_OPEN + body + close]
        self._after_call = True
        return [*calls]


class MarkedCallParser:
    """Parses text followed by calls up to the end of the output."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._marked = False

    def push(self, text: str) -> list[OutputPart]:
        """See ToolCallParser."""
        self._held += text
        if self._marked:
            return []
        start = self._held.find(_MARK)
        self._marked = start >= 0
        end = start if self._marked else len(self._held) - _overlap(self._held, _MARK)
        text, self._held = self._held[:end], self._held[end:]
        return [text] if text else []

    def finish(self) -> list[OutputPart]:
        """See ToolCallParser."""
        if not self._marked:
            return [self._held] if self._held else []
        marked = _split(self._held, _MARK)[1:]
        return [part for body in marked for part in parse_calls(body, self._names) or (_MARK + body,)]


class BareCallParser:
    """Parses output that consists of calls alone. Output with another prefix is text."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: str | None = ""  # None: the output is text

    def push(self, text: str) -> list[OutputPart]:
        """See ToolCallParser."""
        if self._held is None:
            return [text] if text else []
        self._held += text
        if _could_be_calls(self._held):
            return []
        text, self._held = self._held, None
        return [text]

    def finish(self) -> list[OutputPart]:
        """See ToolCallParser."""
        if not self._held:
            return []
        calls = parse_calls(self._held.strip().removeprefix(_PYTHON_TAG), self._names)
        return [*calls] if calls else [self._held]


class EnforcedCallParser:
    """Parses calls between tags or in a list, and passes on their arguments while they are written.

    A constraint guarantees that the output has no other text, so all around the arguments is dropped: the start of a
    call that `max_tokens` cut before its arguments, too.
    """

    def __init__(self) -> None:
        self._held = ""
        self._arguments: _ObjectEnd | None = None  # of the call that is being written

    def push(self, text: str) -> list[OutputPart]:
        """See ToolCallParser."""
        self._held += text
        parts: list[OutputPart] = []
        while self._held:
            if self._arguments is None:
                if not (start := _ENFORCED_START.search(self._held)):
                    break
                parts.append(ToolCallStart(json.loads(start[1])))
                self._held, self._arguments = self._held[start.end() :], _ObjectEnd()
            text, end = self._held, self._arguments.find(self._held)
            parts.append(ArgumentsDelta(text[:end]))
            self._held = "" if end is None else text[end:]
            self._arguments = self._arguments if end is None else None
        return parts

    def finish(self) -> list[OutputPart]:
        """See ToolCallParser."""
        return []


class _MarkFinder:
    """Finds a mark outside JSON strings, in a text that grows. A line end in a string shows that it is no JSON."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._outside = re.compile(f'"|{re.escape(mark)}')
        self._at = 0  # where the search goes on
        self._in_string = False

    def find(self, text: str) -> int:
        """Return the place of the mark, -1 if there is none yet. `text` begins with the text of the last call."""
        while found := (_IN_STRING if self._in_string else self._outside).search(text, self._at):
            if found[0] == self._mark:
                return found.start()
            self._at = found.end()
            if found[0][0] != "\\":
                self._in_string = not self._in_string
        unread = text.endswith("\\") if self._in_string else _overlap(text, self._mark)
        self._at = max(self._at, len(text) - unread)
        return -1


def _split(text: str, mark: str) -> list[str]:
    """Split a text at a mark outside JSON strings; after a string that does not end, anywhere."""
    parts: list[str] = []
    while (end := _MarkFinder(mark).find(text)) >= 0:
        parts.append(text[:end])
        text = text[end + len(mark) :]
    return parts + text.split(mark)


class _ObjectEnd:
    """Finds the end of a JSON object that is given in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escapes = False  # the last piece ended within an escape

    def find(self, piece: str) -> int | None:
        """Return the length of the object's last part if it ends in this piece."""
        start, self._escapes = int(self._escapes), False
        for found in _STRUCTURE.finditer(piece, start):
            mark = found[0]
            if mark[0] == "\\":
                self._escapes = len(mark) == 1
            elif mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark in "{[" else -1
                if not self._depth:
                    return found.end()
        return None


class ArgumentsParser:
    """Passes on the arguments of one tool. A constraint guarantees that the output has no other text."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def push(self, text: str) -> list[OutputPart]:
        """See ToolCallParser."""
        if not text:
            return []
        started, self._started = self._started, True
        return [ArgumentsDelta(text)] if started else [ToolCallStart(self._name), ArgumentsDelta(text)]

    def finish(self) -> list[OutputPart]:
        """See ToolCallParser."""
        return []


def parse_calls(text: str, names: Collection[str]) -> list[ToolCall]:
    """Return the calls in a text that consists of calls of these tools alone, and an empty list for any other text."""
    try:
        return [*_calls(text, names)]
    except (ValueError, RecursionError):
        return []


# The functions below raise ValueError for what is no call.


def _calls(text: str, names: Collection[str]) -> Iterator[ToolCall]:
    at = _skip(_BETWEEN, text, 0)
    while at < len(text):
        if named := _NAME_BEFORE_ARGUMENTS.match(text, at):
            value, at = _value_at(text, named.end())
            yield _tool_call(named[1], value, names)
        else:
            members, at = _object_at(text, at)
            arguments = members.get("arguments") or members.get("parameters", _MISSING)  # as Llama 3 has it
            yield _tool_call(members.get("name", _MISSING).value, arguments, names)
        at = _skip(_BETWEEN, text, at)


def _object_at(text: str, at: int) -> tuple[dict[Any, _Value], int]:
    """Parse an object; return its members and its end. The last of equal keys counts, as in `json.loads`."""
    members: dict[Any, _Value] = {}
    at = _skip(_OBJECT_START, text, at)
    while not text.startswith("}", at):
        key, at = _value_at(text, at)
        members[key.value], at = _value_at(text, _skip(_COLON, text, at))
        at = _skip(_MEMBER_END, text, at)
    return members, at + 1


def _value_at(text: str, at: int) -> tuple[_Value, int]:
    value, end = _DECODER.raw_decode(text, at)
    return _Value(value, text[at:end]), end


def _skip(expected: re.Pattern[str], text: str, at: int) -> int:
    if found := expected.match(text, at):
        return found.end()
    raise ValueError(f"no {expected.pattern} at {at}")


def _tool_call(name: Any, arguments: _Value, names: Collection[str]) -> ToolCall:
    value, text = arguments
    if isinstance(value, str):  # some models encode the arguments as a JSON string
        value, text = json.loads(value), value
    if not isinstance(name, str) or name not in names or not isinstance(value, dict):
        raise ValueError("not a call of an offered tool with an object as its arguments")
    # Refuses NaN, a number out of range, and an unpaired surrogate, which clients cannot read.
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return ToolCall(name, text)


def _could_be_calls(text: str) -> bool:
    """Return True if output with this prefix can consist of calls alone."""
    prefix = text.lstrip()
    if _PYTHON_TAG.startswith(prefix[: len(_PYTHON_TAG)]):
        return True
    if not prefix.startswith("{"):
        return False
    key = prefix[_BLANKS.match(prefix, 1).end() :]  # type: ignore[union-attr]
    return any(expected.startswith(key[: len(expected)]) for expected in _FIRST_KEYS)


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest proper prefix of `mark` at the end of `text`."""
    return next(length for length in range(len(mark) - 1, -1, -1) if text.endswith(mark[:length]))
