"""Small vocabularies of each kind in GGUF files without tensors, the same ones on every machine.

BPE merges are trained on whole texts, not on words. So nearly every place where a text may be split has merges across
it, and a split elsewhere changes ids.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import gguf

from tests.services.models.gguf.texts import texts

_CONTROL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|unused|>")
_MARK = "\u2581"
_ROUNDS, _MERGES_PER_ROUND = 30, 40

BYTE_LEVEL = (
    *("default", "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum"),
    *("modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "exaone4", "mpt", "olmo", "jais", "trillion"),
    *("granite-docling", "starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5", "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"),
    *("stablelm2", "hunyuan", "solar-open", "grok-2", "qwen35", "ufakzeka", "laguna", "seed-coder", "minicpm5"),
    *("k2-horizon", "jais-2", "deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4", "spark2_5", "deepseek-llm"),
    *("deepseek-coder", "youtu", "falcon", "poro-chat", "bloom", "gpt3-finnish", "viking", "tekken", "chameleon"),
    *("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m", "tiny_aya", "cohere2moe"),
    *("kimi-k2", "superbpe", "bailingmoe", "bailingmoe2", "llada-moe", "afmoe", "exaone-moe"),
)
RAW = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "mmbert")


@dataclass(frozen=True)
class Vocabulary:
    """What a file says about its tokens; `keys` are those below `tokenizer.ggml`."""

    model: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float] | None = None
    merges: Sequence[str] | None = None
    keys: Mapping[str, bool | int | str] = field(default_factory=dict)
    name: str = "made"

    def without(self, key: str) -> "Vocabulary":
        """Return the vocabulary without a key, or without its scores or merges."""
        if key in ("scores", "merges"):
            return replace(self, **{key: None})
        return replace(self, keys={name: value for name, value in self.keys.items() if name != key})

    def write(self, path: Path, change: Callable[[gguf.GGUFWriter], None] = lambda _writer: None) -> Path:
        """Write the file; `change` overwrites metadata."""
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name(self.name)
        _add_shape(writer)
        writer.add_tokenizer_model(self.model)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        for key, value in self.keys.items():
            _add(writer, f"tokenizer.ggml.{key}", value)
        change(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path


@cache
def vocabularies() -> dict[str, Vocabulary]:
    """Return all made vocabularies by their names."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    byte_level, raw, merging, unigram, word_pieces = (
        _byte_level(),
        _raw(),
        _merging("<tool>", "    "),
        _unigram(),
        _word_pieces(),
    )
    return {
        **{f"bpe {pre}": _variant(byte_level, ids | {"pre": pre}) for pre in BYTE_LEVEL},
        "bpe without pre": _variant(byte_level, ids),
        "bpe with flags": _variant(
            byte_level, ids | {"pre": "llama-bpe", "add_bos_token": False, "add_eos_token": True}
        ),
        **{f"raw bpe {pre}": _variant(raw, ids | {"pre": pre}) for pre in RAW},
        "gemma4": _variant(raw, ids | {"add_bos_token": False}, model="gemma4"),
        "whitespace": _variant(raw, ids | {"pre": "whitespace"}, model="whitespace"),
        "whitespace in lower case": _variant(
            raw, ids | {"pre": "whitespace", "normalizer.lowercase": True}, model="whitespace"
        ),
        "merging": _variant(merging, ids),
        "merging without prefix": _variant(merging, ids | {"add_space_prefix": False, "add_eos_token": True}),
        "merging phi-3": _variant(_merging("<tool>"), ids | {"add_bos_token": False}, name="Phi-3 made"),
        "unigram": _variant(unigram, ids),
        "unigram with prefix": _variant(unigram, ids | {"add_space_prefix": True, "add_bos_token": True}),
        "unigram without extra spaces": _variant(unigram, ids | {"remove_extra_whitespaces": True}),
        "unigram with both": _variant(unigram, ids | {"remove_extra_whitespaces": True, "add_space_prefix": True}),
        "word pieces": _variant(word_pieces, ids | {"seperator_token_id": 2}),
        "word pieces with case": _variant(word_pieces, ids | {"seperator_token_id": 2, "normalizer.lowercase": False}),
        "word pieces with accents": _variant(
            word_pieces, ids | {"seperator_token_id": 2, "normalizer.strip_accents": False}
        ),
    }


def _variant(made: Vocabulary, keys: Mapping[str, bool | int | str], model: str = "", name: str = "made") -> Vocabulary:
    return replace(made, keys=keys, model=model or made.model, name=name)


def _byte_level() -> Vocabulary:
    alphabet = _byte_letters()
    merges = _trained(tuple("".join(alphabet[byte] for byte in text.encode()) for text in texts()))
    # Words that no merges make, for files whose words are looked up before.
    whole = [
        letter for word in ("Mix", " wor", "567", "_000") for letter in ["".join(alphabet[b] for b in word.encode())]
    ]
    return _of(
        "gpt2", (*alphabet, *_results(merges), *whole), user_defined=("<tool>", "</tool>", "\n\n\n\n"), merges=merges
    )


def _raw() -> Vocabulary:
    merges = _trained(tuple(text.replace(" ", _MARK) for text in texts()))
    letters = sorted({letter for merge in merges for letter in merge.replace(" ", "")})
    return _of("gpt2", (*letters, *_results(merges)), user_defined=("<tool>",), merges=merges, bytes_too=True)


def _merging(*user_defined: str) -> Vocabulary:
    merges = _trained(tuple(text.replace(" ", _MARK) for text in texts()))
    letters = sorted({letter for merge in merges for letter in merge.replace(" ", "")})
    made = _of("llama", (*_results(merges), *letters), user_defined=user_defined, bytes_too=True)
    return replace(made, scores=[-float(token) for token in range(len(made.tokens))])


def _unigram() -> Vocabulary:
    counts = Counter(
        piece
        for text in texts()
        for word in text.replace(" ", f" {_MARK}").split(" ")
        for begin in range(len(word))
        for piece in (word[begin : begin + size] for size in (1, 2, 3, 5))
    )
    pieces = sorted(counts, key=lambda piece: (-counts[piece] * len(piece), piece))[:1500]
    made = _of("t5", (*pieces, *(letter for letter in "abcdefghij" if letter not in pieces)), user_defined=("<tool>",))
    return replace(made, scores=[-(1 + token % 977) / 64 for token in range(len(made.tokens))])


def _word_pieces() -> Vocabulary:
    words = Counter(word for text in texts() for word in text.split())
    parts = Counter(word[begin : begin + size] for word in words for begin in range(len(word)) for size in (1, 2, 4))
    pieces = [piece for piece in sorted(parts, key=lambda piece: (-parts[piece], piece)) if _MARK not in piece][:1200]
    starts = dict.fromkeys((*(piece.lower() for piece in pieces), *pieces[:500]))
    tokens = (*(f"{_MARK}{piece}" for piece in starts), *dict.fromkeys(piece.lower() for piece in pieces))
    return _of("bert", tuple(dict.fromkeys(tokens)))


def _of(
    model: str,
    plain: Sequence[str],
    user_defined: Sequence[str] = (),
    merges: Sequence[str] | None = None,
    bytes_too: bool = False,
) -> Vocabulary:
    bytes_named = [f"<0x{byte:02X}>" for byte in range(256)] if bytes_too else []
    named = {*_CONTROL, *bytes_named, *user_defined}
    groups = (
        (gguf.TokenType.UNKNOWN, _CONTROL[:1]),
        (gguf.TokenType.CONTROL, _CONTROL[1:]),
        (gguf.TokenType.BYTE, bytes_named),
        (gguf.TokenType.USER_DEFINED, user_defined),
        (gguf.TokenType.NORMAL, [text for text in dict.fromkeys(plain) if text not in named]),
    )
    tokens = [text for _, texts_of_type in groups for text in texts_of_type]
    return Vocabulary(model, tokens, [kind for kind, group in groups for _ in group], merges=merges)


@cache
def _trained(corpus: tuple[str, ...]) -> tuple[str, ...]:
    """Return merges of pairs that are frequent in the texts, several a round so that it takes a second."""
    sequences, merges = [list(text) for text in corpus], dict[tuple[str, str], None]()
    for _ in range(_ROUNDS):
        counts = Counter(pair for one in sequences for pair in pairwise(one))
        best = sorted(counts, key=lambda pair: (-counts[pair], pair))[:_MERGES_PER_ROUND]
        found = dict.fromkeys(best)
        merges |= found
        sequences = [_merged(one, found) for one in sequences]
    return tuple(f"{left} {right}" for left, right in merges if " " not in left + right)


def _merged(sequence: list[str], pairs: Mapping[tuple[str, str], None]) -> list[str]:
    merged: list[str] = []
    for symbol in sequence:
        if merged and (merged[-1], symbol) in pairs:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def _results(merges: Sequence[str]) -> list[str]:
    return ["".join(merge.split(" ")) for merge in merges]


def _byte_letters() -> list[str]:
    """Return the letter of each byte in GPT-2's alphabet, in the order of the bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _add_shape(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)


def _add(writer: gguf.GGUFWriter, key: str, value: bool | int | str) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
    add(key, value)
