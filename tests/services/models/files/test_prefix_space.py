"""The setting `add_prefix_space`, which some classes of transformers take from tokenizer_config.json."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from transformers import AutoTokenizer

from services.models.files.tokenizer_loading import load_tokenizer

TEXTS = ("ab a", " ab", "a", "b\na 1")
WORDS = r"[^\s]+|\s+"


def written(folder: Path, pre_tokenizer: PreTokenizer, **settings: object) -> Path:
    """Write a byte-level tokenizer of single letters."""
    letters = sorted({*ByteLevel.alphabet()})
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizer
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def ids(folder: Path, text: str) -> list[int]:
    found: list[int] = load_tokenizer(folder).backend.encode(text).ids
    return found


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("name", ["GPT2Tokenizer", "GPT2TokenizerFast", "GPTNeoXTokenizer", "PreTrainedTokenizerFast"])
def test_the_space_before_a_text_is_that_of_transformers(tmp_path: Path, name: str, in_file: bool, given: bool) -> None:
    folder = written(tmp_path, ByteLevel(add_prefix_space=in_file), tokenizer_class=name, add_prefix_space=given)
    reference = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ids(folder, text) == reference.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_how_texts_are_split_stays_that_of_the_file(tmp_path: Path, name: str) -> None:
    for first in (Digits(individual_digits=True), Split(tokenizers.Regex(WORDS), "isolated")):
        folder = written(tmp_path, Sequence([first, ByteLevel(add_prefix_space=False)]), tokenizer_class=name)
        expected = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert [ids(folder, text) for text in TEXTS] == [expected.encode(text).ids for text in TEXTS]
        written(
            folder, Sequence([first, ByteLevel(add_prefix_space=False)]), tokenizer_class=name, add_prefix_space=True
        )
        assert ids(folder, "ab") == expected.encode(" ab").ids
