"""Where an output with arguments between tags ends: in JSON, in a string without quotes, or in the tags around them.

What JSON forbids beyond its grammar (see `json_output`) applies within values in JSON alone.
"""

from enum import Enum
from typing import NamedTuple

from services.engine.guided.argument_texts import Argument
from services.engine.guided.json_output import JsonPart, JsonPosition
from services.wire.requests.argument_texts import ArgumentTexts

_BEGINS_JSON = frozenset(b'-0123456789[{"')
_NOT_IN_SCALARS = frozenset(b",)}<\n")
_IN_STRING = (JsonPart.STRING, JsonPart.ESCAPE)


class ArgumentPart(Enum):
    """The part at the end of an output."""

    TAGS = "tags"
    BEGINNING = "beginning"  # of a string or another value: its first byte says which
    STRING = "string"
    JSON = "json"


class ArgumentMarks(NamedTuple):
    """The texts that lead from one part to another."""

    before_string: tuple[bytes, ...]
    before_json: tuple[bytes, ...]
    after_string: bytes

    @classmethod
    def of(cls, texts: ArgumentTexts, arguments: list[Argument]) -> "ArgumentMarks":
        """Return the marks of some arguments."""

        def before(keys: list[str], behind: str) -> tuple[bytes, ...]:
            return tuple(f"{texts.before_key}{key}{behind}".encode() for key in dict.fromkeys(keys))

        strings = [one.key for one in arguments if one.text]
        others = [one.key for one in arguments if one.value is not False]
        return cls(before(strings, texts.before_text), before(others, texts.before_value), texts.mark.encode())


class ArgumentPosition(NamedTuple):
    """The position at the end of an output. `tail` is the text since the part began, cut to what can be a mark.

    `json` is the position in a value in JSON, and the initial one elsewhere.
    """

    marks: ArgumentMarks
    part: ArgumentPart = ArgumentPart.TAGS
    tail: bytes = b""
    json: JsonPosition = JsonPosition()

    def after(self, text: bytes) -> "ArgumentPosition":
        """Return the position after more text."""
        position = self
        for at in range(len(text)):
            position = position._after_byte(text[at : at + 1])
        return position

    def _after_byte(self, byte: bytes) -> "ArgumentPosition":
        match self.part:
            case ArgumentPart.TAGS:
                return self._in_tags(byte)
            case ArgumentPart.STRING:
                return self._in_string(byte)
            case ArgumentPart.BEGINNING:
                is_json = byte[0] in _BEGINS_JSON
                begun = self._replace(part=ArgumentPart.JSON if is_json else ArgumentPart.STRING, tail=b"")
                return begun._after_byte(byte)
        at_end = self.json.value is None and self.json.part not in _IN_STRING
        if at_end and byte[0] in _NOT_IN_SCALARS:
            return ArgumentPosition(self.marks)._after_byte(byte)
        return self._replace(json=self.json.after(byte))

    def _in_tags(self, byte: bytes) -> "ArgumentPosition":
        tail = self.tail + byte
        marks = self.marks
        is_json, is_string = tail.endswith(marks.before_json), tail.endswith(marks.before_string)
        if is_json and is_string:
            return ArgumentPosition(marks, ArgumentPart.BEGINNING)
        if is_json or is_string:
            return ArgumentPosition(marks, ArgumentPart.JSON if is_json else ArgumentPart.STRING)
        longest = max(map(len, (*marks.before_json, *marks.before_string)), default=1)
        return self._replace(tail=tail[-longest:])

    def _in_string(self, byte: bytes) -> "ArgumentPosition":
        tail = self.tail + byte
        mark = self.marks.after_string
        if tail.endswith(mark):
            return ArgumentPosition(self.marks)
        return self._replace(tail=tail[-len(mark) :])
