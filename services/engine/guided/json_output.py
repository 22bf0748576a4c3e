"""Bounds of guided JSON that a schema leaves open: blanks, and the length of numbers.

Grammars of JSON schemas allow any number of blanks and digits, and a model that repeats itself would use them until
max_tokens. The grammar bounds blanks. Digits are bounded here, because no schema can: at the limit, tokens with more
digits are masked, unless no other token can follow. So an output never gets stuck.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import NamedTuple, Protocol

_DIGITS = frozenset(b"0123456789")


@dataclass(frozen=True)
class JsonBounds:
    """Maximum blanks between two tokens of JSON, and maximum digits of each part of a number."""

    blanks: int = 1
    integer_digits: int = 20
    decimals: int = 8
    exponent_digits: int = 2

    @property
    def whitespace(self) -> str:
        """Pattern of blanks: 1 is a single space, more is any whitespace; 0 is a pattern that matches nothing."""
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


class JsonPosition(NamedTuple):
    """Position at the end of a text, and the number of digits since that part of the number began."""

    part: JsonPart = JsonPart.ELSEWHERE
    digits: int = 0

    def after(self, text: bytes) -> "JsonPosition":
        """Return the position after more text, which must continue valid JSON."""
        part, digits = self
        for byte in text:
            part, digits = _next(part, digits, byte)
        return JsonPosition(part, digits)


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


class _Tokens(Protocol):
    """The methods of llguidance's tokenizer that are needed here."""

    @property
    def vocab_size(self) -> int: ...

    def decode_bytes(self, token_ids: list[int]) -> bytes: ...


class NumberBounds:
    """Limits the length of numbers, by the leading digits of each token."""

    def __init__(self, tokens: _Tokens, bounds: JsonBounds) -> None:
        """Decode every token once, which takes about 50 ms for 100,000 tokens."""
        self._tokens = tokens
        self._most = {
            JsonPart.ELSEWHERE: bounds.integer_digits,  # a number may begin here
            JsonPart.INTEGER: bounds.integer_digits,
            JsonPart.DECIMALS: bounds.decimals,
            JsonPart.EXPONENT: bounds.exponent_digits,
        }
        self._beginning_with = _by_leading_digits(tokens)

    def after(self, position: JsonPosition, token_id: int) -> JsonPosition:
        """Return the position after a token."""
        return position.after(self._tokens.decode_bytes([token_id]))

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
