"""Reads the input of a custom tool from the arguments of its call, as the model writes them."""

import json
import re

# The one argument of the function that stands for a custom tool.
ARGUMENT = "input"
_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_BEGINNING = f'{{"{ARGUMENT}":"'
_NEXT = re.compile(r'[^"\\]+|"|\\u[0-9a-fA-F]{4}|\\[^u]')
# An escape whose end has not been written yet.
_CUT = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # of half a surrogate pair, which no UTF-8 has


def arguments_of(text: str) -> str:
    """Return the arguments of a call with this input."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)


class CustomInput:
    """Decodes the input while its arguments are written. Arguments of another form are the input as they are."""

    def __init__(self) -> None:
        self._rest = ""  # what is not decoded yet
        self._high = ""  # the first half of a surrogate pair
        self._decode = self._at_start

    def push(self, arguments: str) -> str:
        """Add a part of the arguments; return the part of the input that is final."""
        self._rest += arguments
        return self._decode()

    def finish(self) -> str:
        """Return what is held back at the end of the arguments. An escape that the end cuts is dropped."""
        if self._decode == self._at_start:
            return self._take_rest()
        return self._lone_half()

    def _at_start(self) -> str:
        if opening := _OPENING.match(self._rest):
            self._rest = self._rest[opening.end() :]
            self._decode = self._in_text
        elif not _BEGINNING.startswith("".join(self._rest.split())):
            self._decode = self._take_rest
        else:
            return ""
        return self._decode()

    def _in_text(self) -> str:
        parts, at, text = [], 0, self._rest
        while at < len(text):
            unit = _NEXT.match(text, at)
            if unit is None and _CUT.match(text, at):
                break
            found = unit[0] if unit else text[at]  # a wrong escape stays as it is
            at += len(found)
            if found == '"':
                self._decode = self._behind_text
                parts.append(self._lone_half())
                break
            parts.append(self._decoded(found))
        self._rest = text[at:]
        return "".join(parts)

    def _behind_text(self) -> str:
        self._rest = ""
        return ""

    def _take_rest(self) -> str:
        rest, self._rest = self._rest, ""
        return rest

    def _decoded(self, unit: str) -> str:
        if not unit.startswith("\\u") or len(unit) == 2:
            return self._lone_half() + (_ESCAPES.get(unit[1:], unit) if unit[0] == "\\" else unit)
        code = int(unit[2:], 16)
        if 0xDC00 <= code <= 0xDFFF and self._high:
            high, self._high = self._high, ""
            return (high + chr(code)).encode("utf-16", "surrogatepass").decode("utf-16")
        before = self._lone_half()
        if 0xD800 <= code <= 0xDBFF:
            self._high = chr(code)
            return before
        return before + (_REPLACEMENT if 0xDC00 <= code <= 0xDFFF else chr(code))

    def _lone_half(self) -> str:
        held, self._high = self._high, ""
        return _REPLACEMENT if held else ""
