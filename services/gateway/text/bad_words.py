"""Bad words as token sequences."""

from collections.abc import Iterator, Sequence

from services.gateway.text.tokenizer import Tokenizer
from services.runtime.errors import InvalidField

# Of one word; engines take no longer ones.
_MAX_TOKENS = 32
_FIELD = "logit_rules.bad_words"


def sequences_of(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of each word, alone and after a space: most vocabularies have other tokens there.

    Raises InvalidField, with its index, for a word without tokens or with too many.
    """
    numbers, forms = zip(*_forms(words), strict=True)
    found: dict[tuple[int, ...], int] = {}
    for number, token_ids in zip(numbers, tokenizer.encode_parts(forms), strict=True):
        if not 1 <= len(token_ids) <= _MAX_TOKENS:
            field = f"{_FIELD}[{number}]"
            raise InvalidField(f"{field} must have between 1 and {_MAX_TOKENS} tokens, not {len(token_ids)}", field)
        found.setdefault(tuple(token_ids), number)
    return [list(token_ids) for token_ids in found]


def _forms(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    for number, word in enumerate(words):
        bare = word.lstrip(" ")
        yield number, bare or word
        if bare:
            yield number, f" {bare}"
