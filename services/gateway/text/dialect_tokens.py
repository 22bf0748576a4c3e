"""Which tokens mark thoughts and calls in the dialect of a model."""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from services.gateway.dialects.dialect import Dialect

_MARK_TOKENS = 32


class MarkTokenizer(Protocol):
    """What is needed of the model's tokenizer."""

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """See Tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See Tokenizer."""

    def is_special(self, token_id: int) -> bool:
        """See Tokenizer."""


class DialectTokens:
    """The marks of one model's dialect as tokens."""

    def __init__(self, tokenizer: MarkTokenizer, dialect: Dialect) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect

    @cached_property
    def are_special(self) -> bool:
        """Whether special tokens, which texts leave out, are among the marks."""
        parts = self._tokenizer.encode_parts(self._dialect.marks)
        return any(self._tokenizer.is_special(token_id) for ids in parts for token_id in ids)

    @cached_property
    def around_thought(self) -> tuple[int, int] | None:
        """The tokens that begin and end a thought; None if a mark is not one token."""
        thought = self._dialect.thought
        parts = self._tokenizer.encode_parts((thought.start, thought.end)) if thought else []
        return (parts[0][0], parts[1][0]) if parts and all(len(one) == 1 for one in parts) else None

    def open_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends with the mark that begins a thought."""
        thought = self._dialect.thought
        if thought is None:
            return False
        end = self._tokenizer.decode(prompt_ids[-_MARK_TOKENS:], skip_special_tokens=False)
        return end.rstrip().endswith(thought.start)

    def leaves_open(self, text: str) -> bool:
        """Return whether a text begins a thought that it does not end."""
        thought = self._dialect.thought
        return thought is not None and text.rfind(thought.start) > text.rfind(thought.end)
