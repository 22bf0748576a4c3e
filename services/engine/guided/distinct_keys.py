"""Keeps the keys of an object distinct: grammars of `additionalProperties` and `patternProperties` repeat them.

A parser of JSON takes one of two values of a key, so that repeated keys are fewer than `minProperties` counts. Tokens
that would repeat a key are masked. The beginning of a key is *dead* if it only leads to keys of the object: with
`^202[01]$`, after `"2020"` the digit 0 must be masked, and after `"2021"` too the comma before another key, or the
output would be stuck. Only schemas with `patternProperties` have dead beginnings: any other key can become longer.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from functools import cached_property
from itertools import islice, takewhile
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

from services.engine.guided.json_output import JsonPart, JsonPosition, OpenValue

_QUOTE, _COMMA = b'"', b","
_CLOSING = (b"}", _QUOTE)
_MAX_SEARCHED = 256  # bytes of a key; a longer one is not dead


class DistinctKeys:
    """Finds the tokens of one vocabulary that repeat a key."""

    def __init__(self, tokens: LLTokenizer) -> None:
        """Decode every token once, which takes about 50 ms for 100,000 tokens."""
        self._tokens = tokens
        self._closing: dict[bytes, list[int]] = defaultdict(list)  # by their text before the only quote
        self._several: list[int] = []  # with more quotes
        for token in range(tokens.vocab_size):
            head, *tails = self.text(token).split(_QUOTE)
            if len(tails) == 1:
                self._closing[head].append(token)
            elif tails:
                self._several.append(token)

    def text(self, token_id: int) -> bytes:
        """Return the bytes of a token."""
        return self._tokens.decode_bytes([token_id])

    def distinct(self, position: JsonPosition, mask: bytes) -> bytes:
        """Clear the bits of tokens that repeat a key. None may be left."""
        if position.value is None:
            return mask
        left = bytearray(mask)
        for token in self._repeating(position, position.value, mask):
            left[token // 8] &= ~(1 << token % 8)
        return bytes(left)

    def _repeating(self, position: JsonPosition, value: OpenValue, mask: bytes) -> Iterator[int]:
        """Yield tokens of the mask that repeat a key, and others that are not in it."""
        tried: Iterable[int] = self._several
        if (key := value.key) is not None:
            for one in value.keys:
                if one.startswith(key):
                    yield from self._closing.get(one[len(key) :], ())
            for one in value.dead:
                if one.startswith(key):
                    yield from self._beginning_with(one[len(key) :])
        elif _has_dead_keys(value):
            tried = self._quoted if position.part in (JsonPart.STRING, JsonPart.ESCAPE) else self._structural
        for token in tried:
            if mask[token // 8] >> token % 8 & 1 and position.after(self.text(token)).repeats:
                yield token

    @cached_property
    def _quoted(self) -> list[int]:
        return [token for token in range(self._tokens.vocab_size) if _QUOTE in self.text(token)]

    @cached_property
    def _structural(self) -> list[int]:
        """Tokens that may begin a key or end a value."""
        texts = ((token, self.text(token)) for token in range(self._tokens.vocab_size))
        return [token for token, text in texts if _QUOTE in text or _COMMA in text]

    @cached_property
    def _in_order(self) -> list[int]:
        return sorted(range(self._tokens.vocab_size), key=self.text)

    def _beginning_with(self, text: bytes) -> Iterator[int]:
        start = bisect_left(self._in_order, text, key=self.text)
        return takewhile(lambda token: self.text(token).startswith(text), islice(self._in_order, start, None))

    def first_bytes(self, mask: bytes) -> set[bytes]:
        """Return the bytes with which the tokens of a mask begin."""
        allowed = int.from_bytes(mask, "little")
        return {first for first, tokens in self._by_first_byte.items() if tokens & allowed}

    def shortest(self, mask: bytes) -> int:
        """Return a token of a mask that closes an object or a key, if one does."""
        allowed = int.from_bytes(mask, "little")
        chosen = next((found for first in _CLOSING if (found := allowed & self._by_first_byte.get(first, 0))), allowed)
        return chosen.bit_length() - 1

    @cached_property
    def _by_first_byte(self) -> dict[bytes, int]:
        masks: dict[bytes, bytearray] = {}
        for token in range(self._tokens.vocab_size):
            if first := self.text(token)[:1]:
                mask = masks.setdefault(first, bytearray(self._tokens.vocab_size // 8 + 1))
                mask[token // 8] |= 1 << token % 8
        return {first: int.from_bytes(mask, "little") for first, mask in masks.items()}


class KeyStart(NamedTuple):
    """Where the latest key begins: the matcher before a token, and the token's text up to the key."""

    matcher: LLMatcher
    lead: bytes


class KeyTracker:
    """Finds dead keys of the objects of one schema. `names` are keys, as written, that the schema lists."""

    def __init__(self, tokens: LLTokenizer, keys: DistinctKeys, names: Set[bytes]) -> None:
        self._tokens = tokens
        self._keys = keys
        self._names = names

    def after(
        self, position: JsonPosition, start: KeyStart | None, before: LLMatcher, text: bytes
    ) -> tuple[JsonPosition, KeyStart | None]:
        """Return the position after the text of a token, with its dead keys, and where the latest key begins."""
        for at in range(len(text)):
            key, position = position.key, position.after(text[at : at + 1])
            if key is None and position.key is not None:
                start = KeyStart(before, text[: at + 1])
            elif key is not None and position.key is None and start is not None:
                position = self._with_dead(position, start, key)
        return position, start

    def _with_dead(self, position: JsonPosition, start: KeyStart, key: bytes) -> JsonPosition:
        """Add what is dead since `key` is written. Listed names come before other keys, and only once."""
        value = position.value
        if value is None or key in self._names:
            return position
        search = _Search(self._tokens, self._keys, start, value.keys | self._names, value.dead)
        dead = takewhile(search.is_dead, (key[:end] for end in range(len(key), -1, -1)))
        return position._replace(value=value._replace(dead=value.dead | set(dead)))


class _Search:
    """Whether beginnings of keys are dead. `taken` are the keys that cannot follow."""

    def __init__(
        self, tokens: LLTokenizer, keys: DistinctKeys, start: KeyStart, taken: Set[bytes], dead: Set[bytes]
    ) -> None:
        self._tokens = tokens
        self._keys = keys
        self._start = start
        self._taken = taken
        self._dead = set(dead)
        self._ways = {key[:end] for key in taken for end in range(len(key) + 1)}

    def is_dead(self, beginning: bytes) -> bool:
        """Return True if every continuation leads to keys that are taken."""
        if beginning in self._dead:
            return True
        if beginning not in self._ways or len(beginning) > _MAX_SEARCHED:
            return False
        if any(self._goes_on(beginning, byte) for byte in self._following(beginning)):
            return False
        self._dead.add(beginning)
        return True

    def _goes_on(self, beginning: bytes, byte: bytes) -> bool:
        closes = byte == _QUOTE and not _ends_in_escape(beginning)
        return beginning not in self._taken if closes else not self.is_dead(beginning + byte)

    def _following(self, beginning: bytes) -> set[bytes]:
        matcher = self._start.matcher.deep_copy()
        matcher.consume_tokens(self._tokens.tokenize_bytes(self._start.lead + beginning))
        mask = matcher.compute_bitmask()
        return self._keys.first_bytes(mask)


def _ends_in_escape(text: bytes) -> bool:
    """Return whether a text of a string in JSON ends with the beginning of an escape."""
    return (len(text) - len(text.rstrip(b"\\"))) % 2 == 1


def _has_dead_keys(value: OpenValue | None) -> bool:
    while value is not None and not value.dead:
        value = value.outer
    return value is not None
