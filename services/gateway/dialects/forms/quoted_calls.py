"""Calls with bare keys, and strings between quotes of their own: `call:NAME{key:<|"|>text<|"|>,other:3}`."""

import json
from dataclasses import dataclass
from typing import Any

from services.gateway.dialects.forms.call_form import Around, CallTarget, WrittenCall
from services.gateway.dialects.forms.json_text import loaded
from services.gateway.dialects.scanner import Markers, Reading
from services.wire.requests.argument_texts import ArgumentTexts

_MAX_DEPTH = 64
_ENDS = ",}]"
_PYTHON_NAMES = {"None": None, "True": True, "False": False}


@dataclass(frozen=True)
class QuotedCalls:
    """`before` NAME {...}. Strings have `quote` on both sides. A call is passed on when it is whole."""

    before: str
    quote: str

    @property
    def marks(self) -> tuple[str, ...]:
        """See CallForm."""
        return (self.before, self.quote)

    def read(self, target: CallTarget) -> Reading[bool]:
        """See CallForm."""
        scan = target.scan
        if not (yield from scan.expect(self.before)):
            return False
        name = yield from scan.one_of(target.tools.names)
        if name is None or (yield from scan.skip()) != "{":
            return False
        text = yield from self._up_to(target)
        return target.whole(name, None if text is None else _read(text, self.quote))

    @property
    def argument_texts(self) -> ArgumentTexts:
        """See CallForm. Values within lists and objects are those of JSON, which `read` takes, too."""
        return ArgumentTexts("", f":{self.quote}", self.quote, ":", "", ",")

    def around(self, name: str) -> Around:
        """See CallForm."""
        return Around(f"{self.before}{name}{{", "}")

    def passes(self, target: CallTarget) -> Reading[bool]:
        """See CallForm."""
        yield from target.scan.peek()
        return False

    def written(self, call: WrittenCall) -> str:
        """See CallForm."""
        return f"{self.before}{call.name}{self._value(json.loads(call.arguments))}"

    def _value(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{self._value(value[key])}" for key in sorted(value)) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._value, value)) + "]"
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else json.dumps(value)

    def _up_to(self, target: CallTarget) -> Reading[str | None]:
        """Read up to the end of the section, which is outside strings; return the text, None if there is no end."""
        text, markers = "", Markers.of((target.closing,))
        while True:
            parts: list[str] = []
            found = yield from target.scan.until(markers, parts.append, keeps_blanks=True)
            text += "".join(parts)
            if not found.marker:
                return None
            if text.count(self.quote) % 2 == 0:
                target.scan.at -= len(found.marker)
                return text
            text += found.marker


def _read(text: str, quote: str) -> dict[str, Any] | None:
    """Return the value of an object, None if it is broken."""
    reader = _Values(text.strip(), quote)
    try:
        value = reader.value(0)
        json.dumps(value, allow_nan=False)
    except (ValueError, IndexError):
        return None
    return value if isinstance(value, dict) and reader.at == len(reader.text) else None


class _Values:
    """Reads values from a whole text. Raises ValueError or IndexError if it is broken."""

    def __init__(self, text: str, quote: str) -> None:
        self.text = text
        self.at = 0
        self._quote = quote

    def value(self, depth: int) -> Any:
        """Read a value."""
        if depth > _MAX_DEPTH:
            raise ValueError("too deep")
        self._skip()
        if self.text.startswith(self._quote, self.at):
            return self._string(self._quote)
        if self.text[self.at] == "{":
            return dict(self._items("}", depth, keyed=True))
        if self.text[self.at] == "[":
            return [item for _, item in self._items("]", depth, keyed=False)]
        return self._bare()

    def _items(self, end: str, depth: int, *, keyed: bool) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        self.at += 1
        self._skip()
        while self.text[self.at] != end:
            found.append((self._key() if keyed else "", self.value(depth + 1)))
            self._skip(",")
        self.at += 1
        return found

    def _key(self) -> str:
        if self.text.startswith(self._quote, self.at):
            key = self._string(self._quote)
            self._skip()
        elif self.text.startswith('"', self.at):
            key = str(self._bare())
            self._skip()
        else:
            end = self.text.index(":", self.at)
            key, self.at = self.text[self.at : end].strip(), end
        if self.text[self.at] != ":":
            raise ValueError("no value")
        self.at += 1
        return key

    def _string(self, quote: str) -> str:
        start = self.at + len(quote)
        end = self.text.index(quote, start)
        self.at = end + len(quote)
        return self.text[start:end]

    def _bare(self) -> Any:
        """Read a number or name, or a string in JSON's quotes; another word is a string."""
        if self.text[self.at] == '"':
            value, length = json.JSONDecoder().raw_decode(self.text[self.at :])
            self.at += length
            return value
        start = self.at
        while self.text[self.at] not in _ENDS:
            self.at += 1
        word = self.text[start : self.at].strip()
        if not word:
            raise ValueError("no value")
        if word in _PYTHON_NAMES:
            return _PYTHON_NAMES[word]
        value = loaded(word)
        return word if value is None and word != "null" else value

    def _skip(self, also: str = "") -> None:
        while self.at < len(self.text) and (self.text[self.at].isspace() or self.text[self.at] in also):
            self.at += 1
