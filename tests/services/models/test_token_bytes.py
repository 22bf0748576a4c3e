"""The bound on the text of a token holds for each tokenizer that has one, and lossy tokenizers have none."""

import json
import random
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from services.models.token_bytes import BYTE_CHARACTERS, TokenBytes, token_bytes

ALPHABET = list(BYTE_CHARACTERS.values())
WORDS = [
    "a ",
    "the quick ",
    "Größe ",
    "北京",
    "🙂",
    "\t\n",
    "    ",
    "e\u0301",
    "\u1fbe\u0308\u0301",
    "\x04",
    "\x00",
    "é",
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
SPACES = pre_tokenizers.ByteLevel(add_prefix_space=False)


def byte_level(*extra: str, without: str = "") -> tokenizers.Tokenizer:
    entries = [one for one in [*ALPHABET, *extra] if one not in without]
    merges = [(entry[:-1], entry[-1]) for entry in extra]
    made = tokenizers.Tokenizer(models.BPE({entry: at for at, entry in enumerate(entries)}, merges))
    made.pre_tokenizer = SPACES
    return made


def sentence_piece(byte_fallback: bool = True) -> tokenizers.Tokenizer:
    entries = ["<unk>", *BYTE_TOKENS, "\u2581", "a", "\u2581a", "t", "h", "e"]
    vocabulary = {entry: at for at, entry in enumerate(entries)}
    model = models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return made


def unigram() -> tokenizers.Tokenizer:
    entries = [("<unk>", -9.0), ("a ", -1.0), ("a", -2.0), *((one, -8.0) for one in BYTE_TOKENS)]
    return tokenizers.Tokenizer(models.Unigram(entries, unk_id=0, byte_fallback=True))


def with_normalizer(normalizer: Any) -> tokenizers.Tokenizer:
    made = byte_level("ab")
    made.normalizer = normalizer
    return made


def with_split(split: Any) -> tokenizers.Tokenizer:
    made = byte_level("ab")
    made.pre_tokenizer = split
    return made


def with_token(**settings: Any) -> tokenizers.Tokenizer:
    made = byte_level("ab")
    made.add_special_tokens([AddedToken("<a-long-token>", **settings)])
    return made


def bound(tokenizer: tokenizers.Tokenizer) -> TokenBytes | None:
    return token_bytes(json.loads(tokenizer.to_str()))


BOUNDED: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": lambda: byte_level("ab", "abc"),
    "without control characters": lambda: byte_level("ab", without=BYTE_CHARACTERS[4] + BYTE_CHARACTERS[0]),
    "NFC": lambda: with_normalizer(normalizers.NFC()),
    "two splits": lambda: with_split(
        pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(r"\d"), "isolated"), SPACES])
    ),
    "added token": lambda: with_token(),
    "SentencePiece": sentence_piece,
    "Unigram": unigram,
}


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_more_bytes_than_its_tokens_can(name: str) -> None:
    tokenizer, chance = BOUNDED[name](), random.Random(7)
    found = bound(tokenizer)
    assert found is not None
    texts = [word * 1000 for word in WORDS]
    texts += ["".join(chance.choices([*WORDS, "<a-long-token>"], k=chance.randrange(1, 300))) for _ in range(200)]
    for text in texts:
        assert found.size(text) <= found.most * len(tokenizer.encode(text, add_special_tokens=False).ids), text[:20]


@pytest.mark.parametrize(
    "tokenizer",
    [
        with_normalizer(normalizers.Strip()),
        with_normalizer(normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        with_normalizer(normalizers.Replace("  ", " ")),
        with_normalizer(normalizers.Replace(tokenizers.Regex(" +"), " ")),
        with_normalizer(normalizers.BertNormalizer()),
        with_split(pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), SPACES])),
        with_split(pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), SPACES])),
        with_split(pre_tokenizers.WhitespaceSplit()),
        with_token(rstrip=True),
        with_token(lstrip=True),
        sentence_piece(byte_fallback=False),
        tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
        tokenizers.Tokenizer(models.WordPiece({"a": 0, "<unk>": 1}, unk_token="<unk>")),
    ],
    ids=lambda one: "",
)
def test_a_tokenizer_that_may_lose_text_has_no_bound(tokenizer: tokenizers.Tokenizer) -> None:
    assert bound(tokenizer) is None


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_no_text_shrinks_to_less_than_a_quarter_in_a_normal_form(form: Any) -> None:
    """Each character spreads its bytes over the parts of its decomposition; a composed one can have no more."""
    decomposed: Any = form.replace("C", "D")
    composed = [one for one in map(chr, range(sys.maxunicode + 1)) if unicodedata.decomposition(one)]
    composed += map(chr, range(0xAC00, 0xD7A4))  # Hangul
    most: dict[str, float] = {}
    for character in composed:
        parts = unicodedata.normalize(decomposed, character)
        for part in parts:
            most[part] = max(most.get(part, len(part.encode())), len(character.encode()) / len(parts))
    for character in {*composed, *most}:
        if unicodedata.is_normalized(form, character):
            given = sum(most[part] for part in unicodedata.normalize(decomposed, character))
            assert given <= 4 * len(character.encode()), hex(ord(character))


def test_the_longest_token_of_the_demo_model_is_the_bound(demo_model: Path) -> None:
    found = token_bytes(json.loads((demo_model / "tokenizer.json").read_text(encoding="utf-8")))
    assert found is not None
    assert found.most == 81
    assert found.lost == bytes([4, 6, 19, 20, 22, 29, 0xF1, 0xF2])
