"""Token sequences that an output must not contain."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

# Gateways make two sequences of a word. Each step compares the end of an output with sequences of every length.
MAX_SEQUENCES = 512
MAX_LENGTH = 32

_NONE = frozenset[int]()


@dataclass(frozen=True)
class BadWords:
    """The last token of each sequence is banned where the output ends with the tokens before it.

    These are the bans of transformers' NoBadWordsLogitsProcessor and of vLLM, which matches outputs without the prompt.
    """

    sequences: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def always(self) -> frozenset[int]:
        """The tokens that are banned after any output."""
        return frozenset(one[0] for one in self.sequences if len(one) == 1)

    def banned_after(self, tokens: Sequence[int], start: int, end: int) -> frozenset[int]:
        """Return the tokens banned after the output `tokens[start:end]`.

        If its last token is not known yet, it is taken for one that continues no sequence.
        """
        banned = self.always
        if end > len(tokens):
            return banned
        for length in self._prefix_lengths:
            if length > end - start:
                break
            banned |= self._by_prefix.get(tuple(tokens[end - length : end]), _NONE)
        return banned

    def dead_ends(self, allowed: Collection[int]) -> Iterator[tuple[int, ...]]:
        """Yield the ends of outputs of `allowed` tokens after which all of these are banned."""
        known = frozenset(allowed)
        if len(known) > len(self.sequences):
            return  # as nearly always: a vocabulary has more tokens
        for prefix in self._by_prefix:
            if known.issuperset(prefix) and known <= self.banned_after(prefix, 0, len(prefix)):
                yield prefix

    @cached_property
    def _by_prefix(self) -> dict[tuple[int, ...], frozenset[int]]:
        found = defaultdict[tuple[int, ...], set[int]](set)
        for one in self.sequences:
            if len(one) > 1:
                found[one[:-1]].add(one[-1])
        return {prefix: frozenset(tokens) for prefix, tokens in found.items()}

    @cached_property
    def _prefix_lengths(self) -> tuple[int, ...]:
        return tuple(sorted({len(prefix) for prefix in self._by_prefix}))


NO_BAD_WORDS = BadWords()
