"""Incremental parsers of tool calls in generated text.

The format depends on the model family; the chat template shows which one it is:

TAGGED    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with or without text around it (Qwen, Hermes)
MARKED    `[TOOL_CALLS]`, then a list of such objects or `name{...}` for each call (Mistral)
BARE      the whole output is an object with `name` and `parameters`, or several of them (Llama 3)
"""

import json
import re
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CALL_START = re.compile(r'\n?<tool_call>\n\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
_CALL_END = "}\n</tool_call>"
_MARK = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_FIRST_KEYS = ('"name"', '"type"')
_NAME_BEFORE_ARGUMENTS = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\]\s*)?(?=\{)")
_BETWEEN = re.compile(r"[\s;,]*")
_BLANKS = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


class ToolCall(NamedTuple):
    """A complete tool call; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallStart(NamedTuple):
    """The start of a tool call whose arguments follow as ArgumentsDelta."""

    name: str


class ArgumentsDelta(NamedTuple):
    """The next part of the arguments of the last ToolCallStart."""

    text: str


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


def parser_for(kind: ToolFormat) -> ToolCallParser:
    """Return a new parser of the model's format."""
    parsers: dict[ToolFormat, Callable[[], ToolCallParser]] = {
        ToolFormat.TAGGED: TaggedCallParser,
        ToolFormat.MARKED: MarkedCallParser,
        ToolFormat.BARE: BareCallParser,
    }
    return parsers[kind]()


class TaggedCallParser:
    """Parses calls between tags, with text around them. Drops whitespace after a call."""

    def __init__(self) -> None:
        self._held = ""
        self._in_call = False
        self._after_call = False

    def push(self, text: str) -> list[OutputPart]:
        """See ToolCallParser."""
        self._held += text
        pieces: list[OutputPart] = []
        while (end := self._held.find(_CLOSE if self._in_call else _OPEN)) >= 0:
            before = self._held[:end]
            self._held = self._held[end + len(_CLOSE if self._in_call else _OPEN) :]
            pieces += self._calls(before, _CLOSE) if self._in_call else self._text(before)
            self._in_call = not self._in_call
        if not self._in_call:
            end = len(self._held) - _overlap(self._held, _OPEN)
            pieces += self._text(self._held[:end])
            self._held = self._held[end:]
        return pieces

    def finish(self) -> list[OutputPart]:
        """See ToolCallParser."""
        return self._calls(self._held, "") if self._in_call else self._text(self._held)

    def _text(self, text: str) -> list[OutputPart]:
        if self._after_call:
            text = text.lstrip()
        self._after_call = self._after_call and not text
        return [text] if text else []

    def _calls(self, body: str, close: str) -> list[OutputPart]:
        calls = parse_calls(body)
        if not calls:
            return [_OPEN + body + close]
        self._after_call = True
        return [*calls]


class MarkedCallParser:
    """Parses text followed by calls up to the end of the output."""

    def __init__(self) -> None:
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
        if not self._held:
            return []
        calls = [call for part in self._held.split(_MARK)[1:] for call in parse_calls(part)] if self._marked else []
        return [*calls] if calls else [self._held]


class BareCallParser:
    """Parses output that consists of calls alone. Output with another prefix is text."""

    def __init__(self) -> None:
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
        calls = parse_calls(self._held.strip().removeprefix(_PYTHON_TAG))
        return [*calls] if calls else [self._held]


class CallListParser:
    """Parses one call or a list of calls in JSON. A constraint guarantees that the output has no other text."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[OutputPart]:
        """See ToolCallParser."""
        self._held += text
        pieces: list[OutputPart] = []
        while "}" in text:
            start = self._held.find("{")
            try:
                value, end = _DECODER.raw_decode(self._held, start)
            except ValueError:
                break
            self._held = self._held[end:]
            pieces.append(_tool_call(value) or json.dumps(value))
            text = self._held
        return pieces

    def finish(self) -> list[OutputPart]:
        """See ToolCallParser."""
        rest = self._held.strip(" \t\r\n[],")
        return [rest] if rest else []


class EnforcedCallParser:
    """Parses calls between tags, and passes on their arguments while they are written.

    A constraint guarantees that the output has no other text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._in_arguments = False

    def push(self, text: str) -> list[OutputPart]:
        """See ToolCallParser."""
        self._held += text
        parts: list[OutputPart] = []
        while True:
            if self._in_arguments:
                parts += self._arguments()
            if self._in_arguments or not (start := _CALL_START.match(self._held)):
                return parts
            parts.append(ToolCallStart(json.loads(start[1])))
            self._held, self._in_arguments = self._held[start.end() :], True

    def finish(self) -> list[OutputPart]:
        """See ToolCallParser."""
        if self._in_arguments:
            return [ArgumentsDelta(self._held)] if self._held else []
        return [self._held] if self._held else []

    def _arguments(self) -> list[OutputPart]:
        """Return the arguments so far; hold text that may be their end."""
        # The end cannot be part of the arguments: strings of JSON have no new lines.
        text, end, after = self._held.partition(_CALL_END)
        final = len(text) - (0 if end else _overlap(text, _CALL_END))
        self._held, self._in_arguments = after or text[final:], not end
        return [ArgumentsDelta(text[:final])] if final else []


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


def parse_calls(text: str) -> list[ToolCall]:
    """Return the calls in a text that consists of calls alone, and an empty list for any other text."""
    return [*(_calls_or_none(text) or ())]


def _calls_or_none(text: str) -> list[ToolCall] | None:
    calls: list[ToolCall] = []
    position = _BETWEEN.match(text).end()  # type: ignore[union-attr]  # the pattern matches the empty string, too
    while position < len(text):
        named = _NAME_BEFORE_ARGUMENTS.match(text, position)
        try:
            value, position = _DECODER.raw_decode(text, named.end() if named else position)
        except (ValueError, RecursionError):
            return None
        found = [{"name": named[1], "arguments": value}] if named else value if isinstance(value, list) else [value]
        parsed = [_tool_call(one) for one in found]
        if None in parsed:
            return None
        calls += [one for one in parsed if one is not None]
        position = _BETWEEN.match(text, position).end()  # type: ignore[union-attr]
    return calls


def _tool_call(value: Any) -> ToolCall | None:
    """Parse one JSON object; Llama 3 has the key `parameters` for the arguments."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models encode the arguments as a JSON string
        arguments = _object_in(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except ValueError:  # NaN, a number out of range, or an unpaired surrogate, which no answer can hold
        return None
    return ToolCall(name, text)


def _object_in(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


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
