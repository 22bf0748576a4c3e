"""SentencePiece vocabularies of GGUF files: `llama`, which merges pairs by score, and `t5`, a unigram model."""

from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from engine.errors import ModelUnsupported
from services.models.gguf.byte_pairs import SPACE_MARK
from services.models.gguf.charsmap import checked_charsmap
from services.models.gguf.metadata import SCORES, TokenizerMetadata, TokenType


def merging_tokenizer(metadata: TokenizerMetadata, special: frozenset[int]) -> Tokenizer:
    """Build the tokenizer of a `llama` vocabulary. Raises ModelUnsupported, with the key, if it has no scores."""
    vocabulary = {text: token for token, text in enumerate(metadata.tokens)}
    unknown = metadata.token("unknown", 0)
    model = models.BPE(
        vocabulary,
        _merges(metadata, vocabulary, special),
        unk_token=None if unknown is None else metadata.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = metadata.flag("add_space_prefix", True)
    marks = normalizers.Replace(" ", SPACE_MARK)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marks]) if prefix else marks
    tokenizer.decoder = _decoder(prefix)
    return tokenizer


def _merges(metadata: TokenizerMetadata, vocabulary: dict[str, int], special: frozenset[int]) -> list[tuple[str, str]]:
    """Return each way to make a token of two tokens, those of high scores first, as SentencePiece merges them."""
    if metadata.scores is None:
        raise ModelUnsupported(f"it has no {SCORES}")
    found: list[tuple[float, int, int, str, str]] = []
    for text, token in vocabulary.items():
        if token not in special:
            score = -float(metadata.scores[token])
            found += ((score, token, -len(left), left, right) for left, right in _parts(text, vocabulary))
    return [(left, right) for *_, left, right in sorted(found)]


def _parts(text: str, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    for at in range(1, len(text)):
        left, right = text[:at], text[at:]
        if left in vocabulary and right in vocabulary:
            yield left, right


def unigram_tokenizer(metadata: TokenizerMetadata) -> Tokenizer:
    """Build the tokenizer of a `t5` vocabulary.

    Raises ModelUnsupported, with the key, if it has no scores, or no token for what is unknown.
    """
    if metadata.scores is None:
        raise ModelUnsupported(f"it has no {SCORES}")
    unknown = metadata.token("unknown", 2)
    if unknown is None:
        raise ModelUnsupported("it has no tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(models.Unigram(_scored(metadata), unknown, byte_fallback=False))
    prefix = metadata.flag("add_space_prefix", False)
    tokenizer.normalizer = _unigram_normalizer(metadata, prefix)
    tokenizer.decoder = _decoder(prefix or metadata.flag("remove_extra_whitespaces", False))
    return tokenizer


def _scored(metadata: TokenizerMetadata) -> list[tuple[str, float]]:
    """Return the tokens with their scores. User-defined ones count nothing, so that they win."""
    assert metadata.scores is not None
    scores = metadata.scores.copy()
    scores[metadata.types != TokenType.NORMAL] = 0.0
    unused = metadata.types == TokenType.UNUSED
    scores[unused] = metadata.scores[unused]
    return list(zip(metadata.tokens, map(float, scores), strict=True))


def _unigram_normalizer(metadata: TokenizerMetadata, prefix: bool) -> normalizers.Normalizer:
    stages: list[normalizers.Normalizer] = []
    if charsmap := metadata.charsmap():
        stages.append(normalizers.Precompiled(checked_charsmap(charsmap)))
    if metadata.flag("remove_extra_whitespaces", False):
        stages += [
            normalizers.Replace(Regex(r" +\z"), ""),
            normalizers.Prepend(" "),
            normalizers.Replace(Regex(" +"), " "),
        ]
    elif prefix:
        # A text of spaces alone has no word to prefix.
        stages.append(normalizers.Replace(Regex(r"\A(?= *[^ ])"), " "))
    return normalizers.Sequence([*stages, normalizers.Replace(" ", SPACE_MARK)])


def _decoder(prefix: bool) -> decoders.Decoder:
    """Return the stages from tokens to text; `prefix` is whether encoding added a space."""
    stages: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if prefix else stages)
