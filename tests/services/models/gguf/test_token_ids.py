"""Token ids of GGUF tokenizers are llama.cpp's, which `expected_ids.py` made once."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from services.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from services.models.gguf.tokenizer import GgufTokenizer, gguf_tokenizer
from services.models.model_store import DEMO_MEMBER
from tests.services.models.gguf.expected_ids import digest, digest_of_texts, expected
from tests.services.models.gguf.made_vocabularies import BYTE_LEVEL, RAW, vocabularies
from tests.services.models.gguf.texts import texts

_DIGITS = 8
# A folder with the vocabularies of llama.cpp, `models` in xllamacpp's source distribution.
VOCABULARIES = "QUIRE_GGUF_VOCABULARIES"
MADE = sorted(vocabularies())
FILES = sorted(set(expected()["vocabularies"]) - {*MADE, Path(DEMO_MEMBER).stem})


@cache
def _texts() -> list[str]:
    return texts()


def _different(built: GgufTokenizer, facts: dict[str, Any]) -> list[str]:
    """Return the texts whose ids are others than llama.cpp's."""
    encoded = built.backend.encode_batch_fast(_texts(), add_special_tokens=False)
    digests = [facts["digests"][at : at + _DIGITS] for at in range(0, len(facts["digests"]), _DIGITS)]
    return [text for text, one, wanted in zip(_texts(), encoded, digests, strict=True) if digest(one.ids) != wanted]


def _check(path: Path, name: str) -> None:
    built, facts = gguf_tokenizer(path), expected()["vocabularies"][name]
    assert _different(built, facts) == []
    assert built.backend.encode("a").ids == facts["prompt"]
    assert sorted(built.ends) == facts["ends"]


def test_the_ids_were_made_of_these_texts_and_of_each_known_split() -> None:
    assert expected()["texts"] == digest_of_texts(_texts())
    assert len(_texts()) == 500
    assert {*BYTE_LEVEL, *RAW, "whitespace"} == set(PRE_TOKENIZERS)


@pytest.mark.parametrize("name", MADE)
def test_ids_of_made_vocabularies_are_those_of_llama_cpp(tmp_path: Path, name: str) -> None:
    _check(vocabularies()[name].write(tmp_path / "made.gguf"), name)


def test_ids_of_the_demo_model_are_those_of_llama_cpp(demo_model: Path) -> None:
    file = next(demo_model.glob("*.gguf"))
    _check(file, file.stem)


@pytest.mark.skipif(VOCABULARIES not in os.environ, reason=f"{VOCABULARIES} names no folder")
@pytest.mark.parametrize("name", FILES)
def test_ids_of_public_vocabularies_are_those_of_llama_cpp(name: str) -> None:
    _check(Path(os.environ[VOCABULARIES], f"{name}.gguf"), name)
