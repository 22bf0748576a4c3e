r"""How each value of `tokenizer.ggml.pre` splits a text into the words in which BPE merges.

A GGUF file names the split; the regular expressions are those of the models' own tokenizers, as llama.cpp adapts them
(https://github.com/ggml-org/llama.cpp, src/llama-vocab.cpp and src/unicode.cpp): an expression splits the pieces of the
one before it, and what lies between two matches is a piece too. Written for Oniguruma, which `tokenizers` uses:

* llama.cpp folds every letter beyond ASCII into one class, so upper and lower case are told apart in ASCII only.
* Its ranges contain no whitespace beyond ASCII, and its `$` is the end of a piece.
* Long numbers and runs of whitespace take linear time. Digits are grouped from the right in steps that read each digit
  a fixed number of times; the expression in `tokenizer.json` files, `\d{1,3}(?=(?:\d{3})*\b)`, reads the rest of the
  number for each group. `\s+$` is tried at the begin of a run only, and so is `\s*[\r\n]+` before a list of lengths.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from engine.errors import ModelUnsupported

KEY = "tokenizer.ggml.pre"

_SPACES = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_SPACES}"
_SUFFIXES = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_DIGIT, _THREE_DIGITS, _DIGITS = r"\p{N}", r"\p{N}{1,3}", r"\p{N}+"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SYMBOLS}|{_SPACES}"


def _words(letters: str = r"\p{L}+", numbers: str = _DIGIT, symbols: str = rf"{_SYMBOLS}[\r\n]*") -> str:
    """Return the expression of Llama 3 and its relatives, without the suffixes of English words."""
    return rf"[^\r\n\p{{L}}\p{{N}}]?{letters}|{numbers}|{symbols}|{_LINES}"


def _cased(letters: str, numbers: str, suffixes: str = "") -> str:
    """Return the expression of GPT-4o, whose words end where lower case becomes upper case."""
    upper, lower = rf"[{letters}&&[^a-z]]", rf"[{letters}&&[^A-Z]]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffixes}|{_words(f'{upper}+{lower}*{suffixes}', numbers, _SLASHED)}"
    )


_SLASHED = rf"{_SYMBOLS}[\r\n/]*"
_LLAMA3 = rf"{_SUFFIXES}|{_words(numbers=_THREE_DIGITS)}"
_QWEN2 = rf"{_SUFFIXES}|{_words()}"
_MARKED = r"[\p{L}\p{M}]+"
_JAPANESE = "[一-\u9fa5\u3040-\u30ff]+"
_PUNCTUATED = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_DEEPSEEK3 = rf"{_PUNCTUATED}[\r\n]*|{_LINES}"
# East Asian letters of DeepSeek's first tokenizers, without the whitespace between them.
_EAST_ASIAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&[^\s]]+"
# The blocks whose cased letters DeepSeek's tokenizer lists one by one.
_LISTED = (
    r"A-\u0556\u10a0-\u10c5\u13a0-\u13fd\u1c90-\u2cf3\ua640-\ua78e\uab70-\x{104fb}\x{10c80}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_HAN = (
    r"\u4e00-\u9fff\u3400-\u4dbf\x{20000}-\x{2a6df}\x{2a700}-\x{2b73f}\x{2b740}-\x{2b81f}\x{2b820}-\x{2ceaf}"
    r"\x{2ceb0}-\x{2ebef}\uf900-\ufaff\x{2f800}-\x{2fa1f}"
)
_AFMOE_SCRIPTS = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff"
    r"\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|"  # noqa: RUF001
    rf"{_JAPANESE}"
)
_RUNS_OF_LINES = r"[^\n]+|\n+"
_JAIS2_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))


@dataclass(frozen=True)
class Split:
    """Pieces end before and after each match, or only on the side that `behavior` names."""

    pattern: str
    behavior: str = "isolated"


# Groups of three digits from the right; what stands before a number stays with its first group.
_GROUPED = (
    Split(_DIGITS, "merged_with_previous"),
    Split(r"\A\P{N}*+\p{N}{1,2}(?=(?:\p{N}{3})++\z)"),
    Split(r"(?:\A|(?<=\p{N}))\P{N}*+\p{N}{3}"),
)
# The same for ASCII digits; what stands behind a number, such as a superscript, stays with its last group.
_GROUPED_ASCII = (
    Split(_DIGITS),
    Split(r"(?<![0-9])[0-9]{1,2}(?=(?:[0-9]{3})++(?![0-9]))", "merged_with_previous"),
    Split(r"[0-9]{3}", "merged_with_next"),
)


@dataclass(frozen=True)
class PreTokenizer:
    """A value of `tokenizer.ggml.pre`, with what llama.cpp derives from it beside the split.

    A word that is a token is not merged if `whole_words`; `adds_bos` is the default of a file that does not say, and
    `needs_bos` overrules the file. Bytes are written in GPT-2's alphabet, unless `raw`; then spaces are marked as in
    SentencePiece if `marks_spaces`, and each mark starts a word if `marked_words`.
    """

    splits: tuple[Split, ...]
    whole_words: bool = False
    adds_bos: bool = False
    needs_bos: bool = False
    raw: bool = False
    marks_spaces: bool = False
    marked_words: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Make the stage of a tokenizer."""
        stages: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(one.pattern), one.behavior) for one in self.splits
        ]
        if not self.raw:
            stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(stages)


def _by(*patterns: str, **facts: bool) -> PreTokenizer:
    return PreTokenizer(tuple(map(Split, patterns)), **facts)


_PLAIN_GPT2 = _by(_GPT2)
_DIGIT_THEN_GPT2 = _by(_DIGIT, _GPT2)
_PLAIN_QWEN2 = _by(_QWEN2)
_LLAMA = _by(_LLAMA3, whole_words=True, adds_bos=True)
_GPT4O = _by(_cased(r"\p{L}", _THREE_DIGITS, f"{_SUFFIXES}?"))
_PLAIN_DEEPSEEK3 = _by(_THREE_DIGITS, _JAPANESE, _DEEPSEEK3)
_PLAIN_BLOOM = _by(_BLOOM)
_BAILING = _by(
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|"
    + _SPACES,
)
_TINY_AYA = PreTokenizer(
    (*_GROUPED, Split(_words(rf"{_MARKED}{_SUFFIXES}?", _THREE_DIGITS, _SLASHED))),
)
_GEMMA4 = _by(_RUNS_OF_LINES, raw=True, marks_spaces=True, needs_bos=True)

# Files without the key, or with another kind of vocabulary than BPE.
DEFAULT = _by(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, _DIGITS, "[0-9][0-9][0-9]")

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": DEFAULT,
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum"),
            *("modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "exaone4", "mpt", "olmo", "jais", "trillion"),
            "granite-docling",
        ),
        _PLAIN_GPT2,
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
        _DIGIT_THEN_GPT2,
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        _LLAMA,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _by(_LLAMA3)),
    **dict.fromkeys(("glm4", "glm5"), _by(_LLAMA3, whole_words=True)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        _PLAIN_QWEN2,
    ),
    "qwen35": _by(f"{_SUFFIXES}|" + _words(_MARKED, symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")),
    "ufakzeka": _by(_words()),
    "laguna": _by(_RUNS_OF_LINES, _QWEN2),
    "seed-coder": _by(f"{_SUFFIXES}|" + _words(symbols=r" ?[^\s\p{L}\p{N}\r\n]+")),
    "minicpm5": _by(_THREE_DIGITS, rf"{_SUFFIXES}|{_words(numbers=_DIGITS)}", whole_words=True),
    "k2-horizon": _by(f"'\u017f|{_SUFFIXES}|" + _words(r"[\p{L}\p{M}\u200c\u200d]+", _THREE_DIGITS)),
    "jais-2": _by(
        rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_THREE_DIGITS}|{_SYMBOLS}[\r\n]*|"
        rf"(?<![^\S\r\n])\s*[\r\n]+|{_JAIS2_SPACES}|"
        r"\s{1,2}(?!\S)|\s",
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _PLAIN_DEEPSEEK3),
    "spark2_5": _by(_THREE_DIGITS, _JAPANESE, rf"{_PUNCTUATED}|[\r\n]|{_SPACES}", _DIGIT),
    "deepseek-llm": _by(
        r"[\r\n]",
        rf"\s?[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[{_LISTED}]]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
        r"(?<!\s)\s++\z",
        _EAST_ASIAN,
        _DIGITS,
    ),
    "deepseek-coder": _by(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _DIGIT),
    "youtu": _by(
        _YOUTU_SCRIPTS,
        _words(rf"{_MARKED}{_SUFFIXES}?", symbols=_SLASHED),
        whole_words=True,
    ),
    "falcon": _by(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _PLAIN_BLOOM),
    "viking": _by(_BLOOM, _DIGIT),
    "tekken": _by(
        _cased(r"\p{L}", _DIGIT),
        whole_words=True,
        adds_bos=True,
    ),
    "chameleon": _by(
        "<sentinel:[0-9]+>",
        "IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        _DIGIT,
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
        adds_bos=True,
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
    "granite-embed-multi-97m": _by(
        _cased(r"\p{L}\p{M}", _THREE_DIGITS, f"{_SUFFIXES}?"),
        whole_words=True,
    ),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _TINY_AYA),
    "kimi-k2": _by(
        rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}{_HAN}]?[\p{{L}}&&[^{_HAN}]]+{_SUFFIXES}?|{_THREE_DIGITS}|"
        rf"{_SYMBOLS}[\r\n]*|{_LINES}",
    ),
    "superbpe": PreTokenizer(_GROUPED_ASCII),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "afmoe": PreTokenizer((*_GROUPED, Split(_AFMOE_SCRIPTS), Split(_DEEPSEEK3))),
    "exaone-moe": _by(
        rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SYMBOLS}[\r\n/]?|"
        rf"\s*[\r\n]|{_SPACES}",
    ),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _GEMMA4),
    "sarvam-moe": _by(_RUNS_OF_LINES, raw=True, marks_spaces=True),
    "mmbert": PreTokenizer(
        (Split(r"\n+"), Split("\u2581", "merged_with_next")),
        raw=True,
        marks_spaces=True,
        marked_words=True,
    ),
    "whitespace": PreTokenizer((Split(r"\s+", "removed"),), raw=True),
}


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """Return the split that a file names; llama.cpp's default for a file that names none.

    Raises ModelUnsupported, with the key, for a name that llama.cpp does not know.
    """
    if not name:
        return DEFAULT
    if name not in PRE_TOKENIZERS:
        raise ModelUnsupported(f"its {KEY} is {name[:80]!r}, which is no known way to split texts")
    return PRE_TOKENIZERS[name]
