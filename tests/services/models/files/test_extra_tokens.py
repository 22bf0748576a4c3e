"""Extra special tokens have the ids that transformers gives them, whichever files and fields name them."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.models.files.tokenizer_loading import load_tokenizer
from tests.services.models.files.test_tokenizer_loading import SIZE, TEXT, added, folder_of, token

ABSENT = object()
EXTRA: list[Any] = [ABSENT, None, {}, [], {"image_token": "<img>", "mark": "<mm>"}, ["<zz>"]]
ADDITIONAL: list[Any] = [ABSENT, [], ["<xx>"]]
LATER_EXTRA: list[Any] = [ABSENT, [], ["<yy>"], [token("<yy>", lstrip=True)], {"mark": "<yy>"}]
LATER_ADDITIONAL: list[Any] = [ABSENT, ["<end>"]]
# Roles that not all models have.
ROLES: list[dict[str, Any]] = [{}, {"image_token": "<one>"}, {"audio_token": added("<one>")}]
LATER_ROLES: list[dict[str, Any]] = [{}, {"image_token": "<two>"}]


def given(extra: Any, additional: Any, roles: dict[str, Any]) -> dict[str, Any]:
    fields = {"extra_special_tokens": extra, "additional_special_tokens": additional}
    return {name: value for name, value in fields.items() if value is not ABSENT} | roles


@pytest.mark.parametrize("extra", EXTRA, ids=lambda extra: "absent" if extra is ABSENT else json.dumps(extra))
@pytest.mark.parametrize("additional", ADDITIONAL, ids=["absent", "empty", "one"])
def test_extra_tokens_of_all_files_are_those_of_transformers(tmp_path: Path, extra: Any, additional: Any) -> None:
    text = f"{TEXT} <one><two>"
    for later, more, roles, later_roles in itertools.product(LATER_EXTRA, LATER_ADDITIONAL, ROLES, LATER_ROLES):
        settings, legacy = given(extra, additional, roles), given(later, more, later_roles)
        folder = folder_of(tmp_path, settings, special_tokens_map=legacy)
        loaded, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        case = f"{settings} and {legacy}"
        assert loaded.backend.encode(text).ids == reference(text)["input_ids"], case
        assert loaded.named == reference.special_tokens_map, case


@pytest.mark.parametrize("extra", EXTRA, ids=lambda extra: "absent" if extra is ABSENT else json.dumps(extra))
def test_declared_tokens_leave_out_the_older_file(tmp_path: Path, extra: Any) -> None:
    settings = given(extra, ["<xx>"], {}) | {"added_tokens_decoder": {str(SIZE): token("<yy>")}}
    folder = folder_of(tmp_path, settings, special_tokens_map={"eos_token": "<end>", "extra_special_tokens": ["<mm>"]})
    loaded, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert loaded.backend.encode(TEXT).ids == reference(TEXT)["input_ids"]
    assert loaded.named == reference.special_tokens_map
