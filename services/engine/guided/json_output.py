"""The end of guided JSON, and the bounds that no schema sets: whitespace, and the length of numbers.

Grammars of JSON schemas allow any amount of whitespace and digits, and a model that repeats itself would use them until
max_tokens. The grammar bounds whitespace. Digits are bounded here, because no schema can: at the limit, tokens with
more digits are masked, unless no other token can follow. So an output never gets stuck.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import NamedTuple, Protocol

_DIGITS = frozenset(b"0123456789")


@dataclass(frozen=True)
class JsonBounds:
    """Maximum number of whitespace characters between two tokens of JSON, and of digits in each part of a number."""

    blanks: int = 1
    integer_digits: int = 20
    decimals: int = 8
    exponent_digits: int = 2

    @property
    def whitespace(self) -> str:
        """The pattern of whitespace: one space for 1, any whitespace for more, nothing for 0."""
        return {0: "[^\\s\\S]", 1: " "}.get(self.blanks, rf"[ \n\r\t]{{1,{self.blanks}}}")


DEFAULT_BOUNDS = JsonBounds()


class JsonPart(Enum):
    """The part of JSON at the end of a text."""

    ELSEWHERE = 0
    STRING = 1
    ESCAPE = 2
    INTEGER = 3
    DECIMALS = 4
    EXPONENT = 5


class OpenValue(NamedTuple):
    """An object or array that is not closed yet.

    `keys` are an object's keys so far, as they are written. `key` is the one being written. `dead` are beginnings of
    keys that only lead to keys of the object; an empty one means that no key is left.
    """

    outer: "OpenValue | None"
    is_object: bool
    expects_key: bool
    key: bytes | None = None
    keys: frozenset[bytes] = frozenset()
    dead: frozenset[bytes] = frozenset()


class JsonPosition(NamedTuple):
    """Position at the end of a text, and the number of digits since that part of the number began.

    `repeats` if a key was written twice, or can only become one that is.
    """

    part: JsonPart = JsonPart.ELSEWHERE
    digits: int = 0
    value: OpenValue | None = None
    repeats: bool = False

    @property
    def key(self) -> bytes | None:
        """The beginning of a key at the end of the text."""
        return None if self.value is None else self.value.key

    def after(self, text: bytes) -> "JsonPosition":
        """Return the position after more text, which must continue valid JSON."""
        part, digits, value, repeats = self
        for byte in text:
            before = part
            part, digits = _next(part, digits, byte)
            if before in _IN_STRING or part in _IN_STRING or byte in _STRUCTURE:
                value, repeated = _next_value(value, before, byte)
                repeats = repeats or repeated
        return JsonPosition(part, digits, value, repeats)


_IN_STRING = (JsonPart.STRING, JsonPart.ESCAPE)
_STRUCTURE = frozenset(b"{}[],")


def _next(part: JsonPart, digits: int, byte: int) -> tuple[JsonPart, int]:
    if part is JsonPart.ESCAPE:
        return JsonPart.STRING, 0
    if part is JsonPart.STRING:
        return {0x22: JsonPart.ELSEWHERE, 0x5C: JsonPart.ESCAPE}.get(byte, JsonPart.STRING), 0
    if byte in _DIGITS:
        return (JsonPart.INTEGER, 1) if part is JsonPart.ELSEWHERE else (part, digits + 1)
    if part is not JsonPart.ELSEWHERE and byte in b".":
        return JsonPart.DECIMALS, 0
    if part is not JsonPart.ELSEWHERE and byte in b"eE":
        return JsonPart.EXPONENT, 0
    if part is JsonPart.EXPONENT and byte in b"+-":
        return part, digits
    return (JsonPart.STRING if byte == 0x22 else JsonPart.ELSEWHERE), 0


def _next_value(value: OpenValue | None, part: JsonPart, byte: int) -> tuple[OpenValue | None, bool]:
    """Return the innermost open value after a byte, and whether the byte leads to a repeated key."""
    if part in _IN_STRING:
        return (value, False) if value is None or value.key is None else _next_in_key(value, value.key, part, byte)
    if byte in b"{[":
        return OpenValue(value, byte == 0x7B, byte == 0x7B), False
    if value is None:
        return None, False
    if byte in b"}]":
        return value.outer, False
    if byte == 0x2C:
        return value._replace(expects_key=value.is_object), b"" in value.dead
    return (value._replace(key=b""), b"" in value.dead) if byte == 0x22 and value.expects_key else (value, False)


def _next_in_key(value: OpenValue, key: bytes, part: JsonPart, byte: int) -> tuple[OpenValue, bool]:
    if part is JsonPart.STRING and byte == 0x22:
        return value._replace(key=None, expects_key=False, keys=value.keys | {key}), key in value.keys
    longer = key + bytes((byte,))
    return value._replace(key=longer), longer in value.dead


class _Tokens(Protocol):
    """The methods of llguidance's tokenizer that are needed here."""

    @property
    def vocab_size(self) -> int: ...

    def decode_bytes(self, token_ids: list[int]) -> bytes: ...


class NumberBounds:
    """Limits the length of numbers, by the leading digits of each token."""

    def __init__(self, tokens: _Tokens, bounds: JsonBounds) -> None:
        """Decode every token once, which takes about 50 ms for 100,000 tokens."""
        self._most = {
            JsonPart.ELSEWHERE: bounds.integer_digits,  # a number may begin here
            JsonPart.INTEGER: bounds.integer_digits,
            JsonPart.DECIMALS: bounds.decimals,
            JsonPart.EXPONENT: bounds.exponent_digits,
        }
        self._beginning_with = _by_leading_digits(tokens)

    def bounded(self, position: JsonPosition, mask: bytes) -> bytes:
        """Clear the bits of tokens that make the number too long; return the same mask if none would be left."""
        most = self._most.get(position.part)
        if most is None:
            return mask
        allowed, left = int.from_bytes(mask, "little"), max(0, most - position.digits)
        for digits, tokens in self._beginning_with.items():
            if digits > left:
                allowed &= ~tokens
        return allowed.to_bytes(len(mask), "little") if allowed else mask


def _by_leading_digits(tokens: _Tokens) -> dict[int, int]:
    """Return masks of the tokens by their number of leading digits, for numbers above 0."""
    masks: dict[int, bytearray] = {}
    for token in range(tokens.vocab_size):
        digits = sum(1 for _ in takewhile(_DIGITS.__contains__, tokens.decode_bytes([token])))
        if digits:
            mask = masks.setdefault(digits, bytearray(tokens.vocab_size // 8 + 1))
            mask[token // 8] |= 1 << token % 8
    return {digits: int.from_bytes(mask, "little") for digits, mask in masks.items()}
