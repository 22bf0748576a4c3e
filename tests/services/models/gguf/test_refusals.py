"""Metadata of GGUF tokenizers that is refused, by its key."""

import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import pytest

from engine.errors import ModelUnsupported
from services.models.gguf.tokenizer import gguf_tokenizer
from tests.services.models.gguf.made_vocabularies import vocabularies

_KEYS = "tokenizer.ggml"
# What is wrong with a file, by its message: the vocabulary that it has otherwise, and the change.
REFUSED: dict[str, tuple[str, Callable[[gguf.GGUFWriter], None]]] = {
    f"its {_KEYS}.pre is 'qwen9', which is no known way to split texts": (
        "bpe qwen2",
        lambda file: file.add_tokenizer_pre("qwen9"),
    ),
    f"its {_KEYS}.pre is '7', not a text": ("bpe qwen2", lambda file: file.add_uint32(f"{_KEYS}.pre", 7)),
    f"its {_KEYS}.model is 'rwkv', but only gpt2, gemma4, whitespace, llama, t5, bert are read": (
        "bpe qwen2",
        lambda file: file.add_tokenizer_model("rwkv"),
    ),
    f"its {_KEYS}.eos_token_id is 99999, but it has": ("merging", lambda file: file.add_eos_token_id(99999)),
    f"its {_KEYS}.eot_token_id is -1, but it has": (
        "merging",
        lambda file: file.add_int32(f"{_KEYS}.eot_token_id", -1),
    ),
    f"its {_KEYS}.eom_token_id is 'x', not the id of one of its": (
        "merging",
        lambda file: file.add_string(f"{_KEYS}.eom_token_id", "x"),
    ),
    f"its {_KEYS}.fim_pad_token_id is 4294967295, but it has": (
        "merging",
        lambda file: file.add_uint32(f"{_KEYS}.fim_pad_token_id", 2**32 - 1),
    ),
    f"its {_KEYS}.unknown_token_id is 'True', not the id of": (
        "unigram",
        lambda file: file.add_bool(f"{_KEYS}.unknown_token_id", True),
    ),
    f"its {_KEYS}.bos_token_id is an array, not the id of": (
        "bpe qwen2",
        lambda file: file.add_array(f"{_KEYS}.bos_token_id", [1]),
    ),
    f"its {_KEYS}.add_bos_token is '1', not true or false": (
        "bpe qwen2",
        lambda file: file.add_uint32(f"{_KEYS}.add_bos_token", 1),
    ),
    f"its {_KEYS}.tokens is no array of texts": ("bpe qwen2", lambda file: file.add_array(f"{_KEYS}.tokens", [1, 2])),
    f"its {_KEYS}.tokens is 'a', not an array": ("bpe qwen2", lambda file: file.add_string(f"{_KEYS}.tokens", "a")),
    f"its {_KEYS}.tokens has 'b' 2 times": ("bpe qwen2", lambda file: file.add_token_list(["a", "b", "b"])),
    f"its {_KEYS}.tokens[1] is not UTF-8": ("bpe qwen2", lambda file: file.add_token_list([b"a", b"\xff"])),
    f"its {_KEYS}.tokens[1] has 5000 characters, more than 4096": (
        "bpe qwen2",
        lambda file: file.add_token_list(["a", "b" * 5000]),
    ),
    f"its {_KEYS}.token_type has 2 elements for": ("bpe qwen2", lambda file: file.add_token_types([1, 1])),
    f"its {_KEYS}.token_type is no array of whole numbers": (
        "bpe qwen2",
        lambda file: file.add_array(f"{_KEYS}.token_type", [1.5]),
    ),
    f"its {_KEYS}.scores has 1 elements for": ("merging", lambda file: file.add_token_scores([1.0])),
    f"its {_KEYS}.scores[2] is nan, not a number": (
        "merging",
        lambda file: file.add_token_scores(
            [0.0, 0.0, float("nan")] + [0.0] * (len(vocabularies()["merging"].tokens) - 3)
        ),
    ),
    f"its {_KEYS}.merges[0] is 'ab', not two tokens with a space between": (
        "bpe qwen2",
        lambda file: file.add_token_merges(["ab"]),
    ),
    f"its {_KEYS}.merges[1] merges '~' and 'Q', but '~Q' is no token": (
        "bpe qwen2",
        lambda file: file.add_token_merges(["t h", "~ Q"]),
    ),
    f"its {_KEYS}.precompiled_charsmap is no array of bytes": (
        "unigram",
        lambda file: file.add_array(f"{_KEYS}.precompiled_charsmap", [70000]),
    ),
}
LACKING = {
    f"it has no {_KEYS}.merges": ("bpe qwen2", "merges"),
    f"it has no {_KEYS}.scores": ("merging", "scores"),
    f"it adds the token bos to texts, but has no {_KEYS}.bos_token_id": ("bpe llama-bpe", "bos_token_id"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_damaged_metadata_of_a_tokenizer_is_refused_by_its_key(tmp_path: Path, message: str) -> None:
    name, change = REFUSED[message]
    path = vocabularies()[name].write(tmp_path / "made.gguf", change)
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(message)}"):
        gguf_tokenizer(path)


def charsmap(units: Sequence[int], texts: bytes) -> bytes:
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts


# The root's children are at 256 units from it, and `a` is the first of them; its text ends there.
ROOT, LEAF = 256 << 10, 1 << 8
DAMAGED = {
    "no trie": b"\xff\xff\xff\xff12",
    "children beyond the trie": charsmap([1 << 20 << 10] + [0] * 511, b"x\0"),
    "a replacement beyond the texts": charsmap([ROOT | LEAF] + [0] * 255 + [1 << 31 | 2] + [0] * 255, b"x\0"),
    "a replacement inside a character": charsmap([ROOT | LEAF] + [0] * 255 + [1 << 31 | 1] + [0] * 255, "é\0".encode()),
    "a replacement without an end": charsmap([ROOT] + [0] * 511, b"x"),
    "texts that are not UTF-8": charsmap([ROOT] + [0] * 511, b"\xff\0"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_map_of_characters_with_a_place_beyond_its_end_is_refused(tmp_path: Path, damage: str) -> None:
    path = vocabularies()["unigram"].write(
        tmp_path / "made.gguf", lambda file: file.add_array(f"{_KEYS}.precompiled_charsmap", DAMAGED[damage])
    )
    with pytest.raises(ModelUnsupported, match=rf"^its {_KEYS}\.precompiled_charsmap is damaged"):
        gguf_tokenizer(path)


@pytest.mark.parametrize("message", LACKING)
def test_metadata_that_a_tokenizer_lacks_is_named(tmp_path: Path, message: str) -> None:
    name, key = LACKING[message]
    path = vocabularies()[name].without(key).write(tmp_path / "made.gguf")
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(message)}"):
        gguf_tokenizer(path)
