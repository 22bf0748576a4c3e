"""Tokens that only the settings of a tokenizer name have the ids that transformers gives them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.models.files.tokenizer_loading import InvalidTokenizer, load_tokenizer
from tests.services.gateway.text.test_detokenizer import LINES, byte_level

SIZE = byte_level().get_vocab_size(with_added_tokens=True)
TEXT = " ".join(
    ["so <zz>be  <yy> it<zz><xx>! <img> a<end> <mm>", *LINES[:3], "<zz>", "  <xx>  ", "<ZZ> wording<yy>word"]
)


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, **flags}


def added(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **token(content, **flags)}


def folder_of(folder: Path, settings: dict[str, Any], **files: Any) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "TokenizersBackend", "eos_token": "</s>"}
    contents = {"tokenizer_config": names | settings, "config": {"model_type": "llama", "vocab_size": SIZE + 9}}
    for name, content in (contents | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


FLAGS: list[dict[str, bool]] = [
    {name: value} for name in ("special", "normalized", "lstrip", "rstrip", "single_word") for value in (False, True)
]


SETTINGS: list[dict[str, Any]] = [
    {},
    *({"added_tokens_decoder": {str(SIZE): token("<zz>", **flags)}} for flags in FLAGS),
    {"added_tokens_decoder": {str(SIZE + 1): token("<yy>"), str(SIZE): token("<zz>", special=True)}},
    {"added_tokens_decoder": {str(SIZE): token("<zz>")}, "eos_token": "<zz>"},
    {"added_tokens_decoder": {str(SIZE): token("<zz>")}, "extra_special_tokens": ["<zz>", "<yy>"]},
    {"added_tokens_decoder": {"0": token("<s>", special=True), "1": token("</s>", lstrip=True)}},
    {"extra_special_tokens": ["<zz>", "</s>", "<yy>"]},
    {"extra_special_tokens": [added("<zz>", lstrip=True), added("<yy>", special=True)]},
    {"additional_special_tokens": ["<xx>"]},
    {"additional_special_tokens": ["<xx>"], "extra_special_tokens": ["<zz>"]},
    {"extra_special_tokens": {"image_token": "<img>", "mark": "<mm>"}},
    {"image_token": "<img>", "eos_token": added("<end>", lstrip=True)},
    {
        "pad_token": "<pad>",
        "add_bos_token": True,
        "bos_token": "<yy>",
        "eos_token": "the",
        "cls_token": None,
        "max_token": 5,
        "a_token": {},
    },
]
OLDER: list[dict[str, Any]] = [
    {"special_tokens_map": {"eos_token": "<end>", "additional_special_tokens": ["<xx>"]}},
    {"special_tokens_map": {"eos_token": token("<end>", lstrip=True), "extra_special_tokens": ["<xx>"]}},
    {"added_tokens": {"<zz>": SIZE, "<end>": SIZE + 1, "</s>": 1}},
]


@pytest.mark.parametrize(
    ("settings", "files"),
    [*((settings, {}) for settings in SETTINGS), *((settings, files) for settings in SETTINGS[13:] for files in OLDER)],
    ids=lambda values: json.dumps(values)[:60],
)
def test_tokens_of_the_settings_are_those_of_transformers(
    tmp_path: Path, settings: dict[str, Any], files: dict[str, Any]
) -> None:
    folder = folder_of(tmp_path, settings, **files)
    loaded, reference = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert loaded.backend.encode(TEXT).ids == reference(TEXT)["input_ids"]
    assert loaded.backend.get_vocab_size(with_added_tokens=True) == len(reference)
    ids = range(len(reference))
    for skip in (False, True):
        assert loaded.backend.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)
    assert loaded.named == reference.special_tokens_map


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (
            {"added_tokens_decoder": {str(SIZE + 1): token("<zz>")}},
            f"the id {SIZE + 1}, but the next free id is {SIZE}",
        ),
        ({"added_tokens_decoder": {"0": token("<zz>")}}, "gives '<zz>' the id 0, the id of '<s>'"),
        ({"extra_special_tokens": [f"<{at}>" for at in range(10)]}, f"'<9>' has the id {SIZE + 9}, beyond the model's"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder must be an object"),
        ({"added_tokens_decoder": {"-1": token("<zz>")}}, "added_tokens_decoder.*-1"),
        ({"added_tokens_decoder": {"9" * 4000: token("<zz>")}}, "added_tokens_decoder.*999"),
        ({"added_tokens_decoder": {"1": 7}}, "added_tokens_decoder.1 must be an object"),
        ({"added_tokens_decoder": {"1": {"content": "a", "special": "yes"}}}, "added_tokens_decoder.1.special must be"),
        ({"added_tokens_decoder": {"1": token("x" * 1025)}}, "added_tokens_decoder.1 must have at most 1,024"),
        ({"extra_special_tokens": "<zz>"}, "extra_special_tokens must be an object or an array"),
        ({"extra_special_tokens": ["<zz>", [3]]}, r"extra_special_tokens\[1\] must be a string or an object"),
        ({"chat_template": 7}, "chat_template must be a string, an array or an object"),
        ({"chat_template": [{"name": "default"}]}, r"chat_template\[0\].template is missing"),
    ],
)
def test_settings_that_contradict_the_tokenizer_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], fault: str
) -> None:
    with pytest.raises(InvalidTokenizer, match=f"^tokenizer_config.json: .*{fault}"):
        load_tokenizer(folder_of(tmp_path, settings))


def test_tokens_of_tokenizer_json_may_lie_beyond_the_embeddings(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"extra_special_tokens": ["</s>"]}, config={"vocab_size": 1})
    assert load_tokenizer(folder).backend.token_to_id("</s>") == 1


@pytest.mark.parametrize(
    ("files", "fault"),
    [({}, "No tokenizer can be read"), ({"tokenizer.json": "{"}, "^tokenizer.json is not valid JSON")],
    ids=["missing", "damaged"],
)
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, files: dict[str, str], fault: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidTokenizer, match=fault):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"])
@pytest.mark.parametrize("wrong", [{"type": "ByteLevell"}, 5, []])
def test_the_part_of_tokenizer_json_that_cannot_be_read_is_named(tmp_path: Path, part: str, wrong: Any) -> None:
    path = folder_of(tmp_path, {}) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: wrong}))
    with pytest.raises(InvalidTokenizer, match=f"^tokenizer.json: {part} cannot be read: "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("model", [{"type": "x", "vocab": {}}, {"type": "BPE", "vocab": {"a": 0}, "merges": [1]}])
def test_a_vocabulary_that_cannot_be_read_is_named(tmp_path: Path, model: dict[str, Any]) -> None:
    path = folder_of(tmp_path, {}) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": model}))
    with pytest.raises(InvalidTokenizer, match=r"^tokenizer\.json: model or added_tokens cannot be read: "):
        load_tokenizer(tmp_path)
