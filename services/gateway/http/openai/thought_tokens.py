"""Counts the tokens of thoughts."""

from collections.abc import Sequence

from services.gateway.text.tokenizer import Tokenizer


class ThoughtTokens:
    """The number of tokens in the thoughts of one sample, without those that mark a thought.

    Marks that are one token are found among the tokens. Otherwise the text of the thought is tokenized at the end.
    """

    def __init__(self, tokenizer: Tokenizer, *, in_thought: bool) -> None:
        self._tokenizer = tokenizer
        self._marks = tokenizer.dialect_tokens.around_thought
        self._either = frozenset(self._marks or ())
        self._in_thought = in_thought
        self._texts: list[str] = []

    def add(self, token_ids: Sequence[int]) -> int:
        """Add generated tokens; return how many of them are in thoughts, as far as they show it."""
        if self._marks is None:
            return 0
        if len(token_ids) == 1 and token_ids[0] not in self._either:  # as in most deltas
            return self._in_thought
        count, (start, _) = 0, self._marks
        for token in token_ids:
            if token in self._either:
                self._in_thought = token == start
            else:
                count += self._in_thought
        return count

    def add_text(self, text: str) -> None:
        """Add the text of a thought."""
        if self._marks is None:
            self._texts.append(text)

    def finish(self) -> int:
        """Return how many tokens are in thoughts beside those that `add` returned."""
        return len(self._tokenizer.encode_parts(["".join(self._texts)])[0]) if self._texts else 0
