"""How JSON is written where a language leaves it open: blanks, and how long a number may become.

Grammars of JSON schemas let blanks and digits go on for ever, and models that have lost their way take what they can
get until max_tokens. Blanks are bounded by the grammar; digits here, since no schema can bound them: where a number has
as many as it may, no token that brings more is chosen, unless nothing else can follow. So nothing ever gets stuck.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import NamedTuple, Protocol

_DIGITS = frozenset(b"0123456789")


@dataclass(frozen=True)
class JsonBounds:
    """Blanks between two tokens of JSON at most, and digits of each part of a number."""

    blanks: int = 1
    integer_digits: int = 20
    decimals: int = 8
    exponent_digits: int = 2

    @property
    def whitespace(self) -> str:
        """The pattern of blanks: one is a space, more can be any. It matches nothing where there is to be none."""
        return {0: "[^\\s\\S]", 1: " "}.get(self.blanks, rf"[ \n\r\t]{{1,{self.blanks}}}")


DEFAULT_BOUNDS = JsonBounds()


class JsonPart(Enum):
    """Where in JSON a text ends."""

    ELSEWHERE = 0
    STRING = 1
    ESCAPE = 2
    INTEGER = 3
    DECIMALS = 4
    EXPONENT = 5


class JsonPosition(NamedTuple):
    """Where a text ends, and the digits since the part of the number began."""

    part: JsonPart = JsonPart.ELSEWHERE
    digits: int = 0

    def after(self, text: bytes) -> "JsonPosition":
        """Return the position after more of the text, which is JSON so far."""
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
    """The part of llguidance's tokenizer that is needed here."""

    @property
    def vocab_size(self) -> int: ...

    def decode_bytes(self, token_ids: list[int]) -> bytes: ...


class NumberBounds:
    """Keeps numbers short, by the digits that each token begins with."""

    def __init__(self, tokens: _Tokens, bounds: JsonBounds) -> None:
        """Look at every token once, which takes some 50 ms where there are 100,000."""
        self._tokens = tokens
        self._most = {
            JsonPart.ELSEWHERE: bounds.integer_digits,  # where a number may begin
            JsonPart.INTEGER: bounds.integer_digits,
            JsonPart.DECIMALS: bounds.decimals,
            JsonPart.EXPONENT: bounds.exponent_digits,
        }
        self._beginning_with = _by_leading_digits(tokens)

    def after(self, position: JsonPosition, token_id: int) -> JsonPosition:
        """Return the position after a token."""
        return position.after(self._tokens.decode_bytes([token_id]))

    def bounded(self, position: JsonPosition, mask: bytes) -> bytes:
        """Return a mask without the tokens that make the number too long; the same where nothing else can follow."""
        most = self._most.get(position.part)
        if most is None:
            return mask
        allowed, left = int.from_bytes(mask, "little"), max(0, most - position.digits)
        for digits, tokens in self._beginning_with.items():
            if digits > left:
                allowed &= ~tokens
        return allowed.to_bytes(len(mask), "little") if allowed else mask


def _by_leading_digits(tokens: _Tokens) -> dict[int, int]:
    """Return, for each count of leading digits above 0, the tokens that have it, as the bits of a mask."""
    masks: dict[int, bytearray] = {}
    for token in range(tokens.vocab_size):
        digits = sum(1 for _ in takewhile(_DIGITS.__contains__, tokens.decode_bytes([token])))
        if digits:
            mask = masks.setdefault(digits, bytearray(tokens.vocab_size // 8 + 1))
            mask[token // 8] |= 1 << token % 8
    return {digits: int.from_bytes(mask, "little") for digits, mask in masks.items()}
