"""BPE vocabularies of GGUF files: `gpt2`, whose tokens are bytes in GPT-2's alphabet, and `gemma4`, of characters."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from engine.errors import ModelUnsupported
from services.models.gguf.metadata import MERGES, TokenizerMetadata
from services.models.gguf.pre_tokenizers import KEY, PreTokenizer, pre_tokenizer

SPACE_MARK = "\u2581"


def split_of(metadata: TokenizerMetadata) -> PreTokenizer:
    """Return how a file splits texts into words. Raises ModelUnsupported, with the key, for an unknown split."""
    return pre_tokenizer("gemma4" if metadata.model == "gemma4" else metadata.text(KEY))


def byte_pair_tokenizer(metadata: TokenizerMetadata) -> Tokenizer:
    """Build the tokenizer of a BPE vocabulary. Raises ModelUnsupported, with the key, if it contradicts itself."""
    split = split_of(metadata)
    vocabulary = {text: token for token, text in enumerate(metadata.tokens)}
    merges = metadata.merges()
    if merges is None and metadata.text(KEY) != "kimi-k2":  # whose first files have none
        raise ModelUnsupported(f"it has no {MERGES}")
    model = models.BPE(
        vocabulary,
        _usable(merges or [], vocabulary),
        byte_fallback=split.raw,
        ignore_merges=split.whole_words,
        fuse_unk=False,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split.build()
    tokenizer.normalizer = _normalizer(metadata, split)
    tokenizer.decoder = _characters() if split.raw else decoders.ByteLevel()
    return tokenizer


def _usable(merges: Iterable[tuple[str, str]], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return each pair once, as early as it stands: a later one would replace it.

    Raises ModelUnsupported if a pair or its result is no token.
    """
    found = dict.fromkeys(merges)
    for at, (left, right) in enumerate(found):
        wrong = next((one for one in (left, right, left + right) if one not in vocabulary), None)
        if wrong is not None:
            raise ModelUnsupported(
                f"its {MERGES}[{at}] merges {left[:40]!r} and {right[:40]!r}, but {wrong[:80]!r} is no token"
            )
    return list(found)


def _normalizer(metadata: TokenizerMetadata, split: PreTokenizer) -> normalizers.Normalizer | None:
    if metadata.model == "whitespace" and metadata.flag("normalizer.lowercase", False):
        return lower_case()
    if not split.marks_spaces:
        return None
    marks = normalizers.Replace(" ", SPACE_MARK)
    if not split.marked_words:
        return marks
    # The first word of each line has a mark too.
    first = Regex(rf"(?:\A|(?<=\n))(?=[^\n{SPACE_MARK}])")
    return normalizers.Sequence([marks, normalizers.Replace(first, SPACE_MARK)])


def lower_case() -> normalizers.Normalizer:
    """Return the stage that maps each letter to one letter: the library makes two of a capital I with a dot."""
    return normalizers.Sequence([normalizers.Replace("\u0130", "i"), normalizers.Lowercase()])


def _characters() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
