"""WordPiece vocabularies of GGUF files: `bert`. The file marks the pieces that begin a word, BERT the others."""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.errors import ModelUnsupported
from services.models.gguf.byte_pairs import SPACE_MARK, lower_case
from services.models.gguf.metadata import TOKENS, TokenizerMetadata

_CONTINUED = "##"
_MOST_WORD_CHARACTERS = 1 << 20
# https://www.unicode.org/versions/latest/, section 3.12
_HANGUL_INITIALS, _HANGUL_SYLLABLES = 19, 588
# Ideographs are words of their own. Not quite a block each: https://github.com/google-research/bert, tokenization.py.
_IDEOGRAPHS = (
    r"\u4e00-\u9fff\u3400-\u4dbf\x{20000}-\x{2a6df}\x{2a700}-\x{2b73f}\x{2b740}-\x{2b81f}\x{2b920}-\x{2ceaf}"
    r"\uf900-\ufaff\x{2f800}-\x{2fa1f}"
)


def word_piece_tokenizer(metadata: TokenizerMetadata, whole: frozenset[int]) -> Tokenizer:
    """Build the tokenizer of a `bert` vocabulary, whose tokens `whole` are no parts of words.

    Raises ModelUnsupported, with the key, if no token is the unknown, or two tokens are one to BERT.
    """
    unknown = metadata.token("unknown", 100)
    if unknown is None:
        raise ModelUnsupported("it has no tokenizer.ggml.unknown_token_id")
    vocabulary = {_entry(text, token in whole): token for token, text in enumerate(metadata.tokens)}
    if len(vocabulary) < len(metadata.tokens):
        raise ModelUnsupported(f"its {TOKENS} has a token twice, at the begin of words and for itself")
    model = models.WordPiece(
        vocabulary,
        unk_token=metadata.tokens[unknown],
        max_input_chars_per_word=_MOST_WORD_CHARACTERS,
        continuing_subword_prefix=_CONTINUED,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = _normalizer(metadata)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "removed"),
            pre_tokenizers.Split(Regex(rf"[\p{{P}}!-/:-@\[-`{{-~{_IDEOGRAPHS}]"), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.WordPiece(_CONTINUED, cleanup=False)
    return tokenizer


def _entry(text: str, whole: bool) -> str:
    if whole:
        return text
    return text[1:] if text.startswith(SPACE_MARK) and len(text) > 1 else _CONTINUED + text


def _first_letter(initial: int) -> normalizers.Normalizer:
    """Return the stage that leaves the first letter of the Hangul syllables with this one, as llama.cpp does."""
    begin = 0xAC00 + initial * _HANGUL_SYLLABLES
    return normalizers.Replace(Regex(f"[{chr(begin)}-{chr(begin + _HANGUL_SYLLABLES - 1)}]"), chr(0x1100 + initial))


def _normalizer(metadata: TokenizerMetadata) -> normalizers.Normalizer:
    lowercase = metadata.flag("normalizer.lowercase", True)
    stages: list[normalizers.Normalizer] = []
    if metadata.flag("normalizer.strip_accents", lowercase):
        stages += [*map(_first_letter, range(_HANGUL_INITIALS)), normalizers.NFD()]
        stages.append(normalizers.Replace(Regex(r"\p{M}"), ""))
    stages.append(normalizers.Replace(Regex(r"[\p{Cc}\p{Cf}\p{Co}\ufffd&&[^\s]]"), ""))
    return normalizers.Sequence([*stages, lower_case()] if lowercase else stages)
