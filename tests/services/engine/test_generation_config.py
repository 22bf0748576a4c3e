"""What a model's files say about generation: defaults of requests, end tokens, and what is refused by its name."""

import itertools
import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from engine.errors import ModelUnsupported
from quire.v1.decoding_pb2 import GenerationDefaults
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import assemble
from services.engine.startup.end_tokens import end_tokens
from services.engine.startup.generation_config import check_generation, generation_defaults
from services.models.files.bounded_json import InvalidModelFile
from services.models.files.schemas import GenerationConfig, check_schema
from services.runtime.settings import InvalidSetting
from tests.tiny_models import VOCABULARY

GENERATION, CONFIG, TOKENIZER = "generation_config.json", "config.json", "tokenizer_config.json"
BEGIN = 1  # its text in the tiny tokenizer is <|begin|>
HUGE = 10**400


@pytest.fixture
def folder(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny model's small files."""
    for name in (GENERATION, CONFIG, TOKENIZER, "tokenizer.json"):
        shutil.copy(tiny_model("llama") / name, tmp_path)
    return tmp_path


def write(folder: Path, **given: Any) -> None:
    (folder / GENERATION).write_text(json.dumps(given))


def change(path: Path, **given: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | given))


@pytest.mark.parametrize(
    ("given", "defaults"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, GenerationDefaults(temperature=0.6, top_p=0.9)),
        ({"repetition_penalty": 1.3, "top_k": 20}, GenerationDefaults(repetition_penalty=1.3, top_k=20)),
        ({"max_new_tokens": 64, "max_length": 20, "min_p": 0.1}, GenerationDefaults(max_tokens=64, min_p=0.1)),
        ({"temperature": 0, "top_k": -1}, GenerationDefaults(temperature=0.0, top_k=0)),
        ({"temperature": None, "eos_token_id": 0}, GenerationDefaults()),
        ({"temperature": 0.7, "do_sample": False}, GenerationDefaults(temperature=0.7)),
    ],
)
def test_the_values_of_the_file_are_the_models_defaults(
    folder: Path, given: dict[str, Any], defaults: GenerationDefaults
) -> None:
    write(folder, **given)
    assert generation_defaults("auto", folder) == defaults


def test_a_model_without_the_file_has_no_defaults(folder: Path) -> None:
    (folder / GENERATION).unlink()
    assert generation_defaults("auto", folder) == GenerationDefaults()


def test_none_ignores_the_values_of_the_file_and_another_folder_replaces_them(folder: Path) -> None:
    write(folder, temperature=0.6, eos_token_id=3)
    other = folder / "other"
    other.mkdir()
    write(other, top_k=5, eos_token_id=4)
    assert generation_defaults("none", folder) == GenerationDefaults()
    assert generation_defaults(str(other), folder) == GenerationDefaults(top_k=5)
    assert end_tokens("none", folder, frozenset(), VOCABULARY) == {0, 3}
    assert end_tokens(str(other), folder, frozenset(), VOCABULARY) == {0, 3, 4}


def test_faults_of_another_folder_are_reported_with_it(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    for values, fault in (({"top_p": 2}, "top_p must be above 0"), ({"eos_token_id": 9**9}, "eos_token_id must be")):
        write(other, **values)
        with pytest.raises(ModelUnsupported, match=f"^{re.escape(str(other / GENERATION))}: {fault}"):
            check_generation(str(other), folder)


def test_a_setting_that_is_no_folder_with_the_file_is_refused(folder: Path) -> None:
    for check in (generation_defaults, check_generation):
        with pytest.raises(InvalidSetting, match=r"^generation_config must be auto, none or a folder with"):
            check(str(folder / "nowhere"), folder)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.5}, "temperature must be a finite number of at least 0, not -0.5"),
        ({"temperature": float("nan")}, "temperature must be a finite number, not NaN"),
        ({"temperature": HUGE}, "temperature must be less than 2^1024"),
        ({"temperature": "0.6"}, "temperature must be a number"),
        ({"temperature": True}, "temperature must be a number"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"top_k": -2}, "top_k must be at least 0, not -2"),
        ({"top_k": 1 << 31}, "top_k must be less than 2^31"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1, not 1.01"),
        ({"min_p": [0.1]}, "min_p must be a number"),
        ({"min_p": 2}, "min_p must be between 0 and 1, not 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number above 0, not 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be a finite number, not Infinity"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ({"eos_token_id": VOCABULARY}, f"eos_token_id must be between 0 and {VOCABULARY - 1}, not {VOCABULARY}"),
        ({"eos_token_id": [3, -1]}, f"eos_token_id must be between 0 and {VOCABULARY - 1}, not -1"),
        ({"eos_token_id": "<|end|>"}, "eos_token_id must be a token id, or a list of them, not '<|end|>'"),
        ({"eos_token_id": [0, 2.0]}, "eos_token_id must be a token id, or a list of them, not '[0, 2.0]'"),
        ({"eos_token_id": True}, "eos_token_id must be a token id, or a list of them, not 'True'"),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_by_its_name(folder: Path, given: dict[str, Any], message: str) -> None:
    write(folder, **given)
    with pytest.raises(ModelUnsupported) as caught:
        check_generation("auto", folder)
    assert str(caught.value) == f"{GENERATION}: {message}"


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "[" * 100_000])
def test_a_damaged_file_is_refused_by_its_name(folder: Path, text: str) -> None:
    (folder / GENERATION).write_bytes(text.encode("latin-1"))
    with pytest.raises(
        ModelUnsupported, match=r"^generation_config\.json (is not valid JSON|must be a JSON object|is nested)"
    ):
        check_generation("auto", folder)


DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
NUMBERS = (-2, -1, -0.5, 0, 5e-324, 0.5, 1, 1.5, 101, 1e300, 2**31 - 1, 2**31, 2**62)


def test_the_files_schema_takes_the_numbers_that_requests_may_have(folder: Path) -> None:
    def refused(check: Callable[[], object], error: type[Exception]) -> bool:
        try:
            check()
        except error:
            return True
        return False

    for name, number in itertools.product(DEFAULTS, NUMBERS):
        write(folder, **{name: number})
        by_schema = refused(lambda: check_schema(GENERATION, GenerationConfig, {name: number}), InvalidModelFile)  # noqa: B023
        by_rule = refused(lambda: generation_defaults("auto", folder), ModelUnsupported)
        assert by_schema == by_rule, (name, number)


def test_the_end_tokens_of_config_json_hold_where_the_other_file_names_none(folder: Path) -> None:
    write(folder, temperature=0.5)
    change(folder / CONFIG, eos_token_id=[7, 8])
    assert end_tokens("auto", folder, frozenset(), VOCABULARY) == {0, 7, 8}
    change(folder / CONFIG, eos_token_id="end")
    with pytest.raises(ModelUnsupported, match=r"^config\.json: eos_token_id must be a token id"):
        check_generation("auto", folder)


def test_an_empty_list_names_no_end_token(folder: Path) -> None:
    write(folder, eos_token_id=[])
    change(folder / CONFIG, eos_token_id=5)
    assert end_tokens("auto", folder, frozenset(), VOCABULARY) == {0, 5}


def test_the_bounds_are_those_of_a_nested_text_model(folder: Path) -> None:
    write(folder)
    (folder / CONFIG).write_text(json.dumps({"text_config": {"vocab_size": 50, "eos_token_id": 50}}))
    with pytest.raises(ModelUnsupported, match="eos_token_id must be between 0 and 49, not 50"):
        check_generation("auto", folder)


@pytest.mark.parametrize("named", ["<|begin|>", {"content": "<|begin|>", "lstrip": False}])
def test_the_end_token_of_the_tokenizer_ends_texts_too(
    folder: Path, named: object, caplog: pytest.LogCaptureFixture
) -> None:
    change(folder / TOKENIZER, eos_token=named)
    with caplog.at_level(logging.INFO, "quire.engine"):
        assert end_tokens("auto", folder, frozenset({0}), VOCABULARY) == {0, BEGIN}
    assert caplog.messages == [f"texts end at the tokens 0 ({GENERATION}) and {BEGIN} ({TOKENIZER})"]


def test_an_end_token_that_only_the_settings_have_ends_texts(folder: Path) -> None:
    change(folder / CONFIG, vocab_size=2 * VOCABULARY)
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size(with_added_tokens=True)
    change(folder / TOKENIZER, eos_token="<zz>", added_tokens_decoder={str(own): {"content": "<zz>", "special": True}})
    assert end_tokens("auto", folder, frozenset(), 2 * VOCABULARY) == {0, own}


def test_an_engine_stops_at_the_end_tokens_of_all_files(folder: Path, tiny_model: Callable[[str], Path]) -> None:
    shutil.copy(tiny_model("llama") / "model.safetensors", folder)
    write(folder, eos_token_id=[0, 5])
    change(folder / TOKENIZER, eos_token="<|begin|>")
    parts = assemble(EngineSettings(model=str(folder), dtype="float32", attention_backend="torch", device_blocks=8))
    assert parts.loaded.eos_token_ids == {0, BEGIN, 5}


def test_an_end_token_that_is_no_token_of_the_model_is_left_out_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(folder / TOKENIZER, eos_token="<|nobody|>")
    assert end_tokens("auto", folder, frozenset({0, 4 * VOCABULARY}), VOCABULARY) == {0}
    assert caplog.messages == [f"{TOKENIZER}: eos_token '<|nobody|>' is no token of the model, so it ends no text"]


def test_an_end_token_that_is_text_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, eos_token_id=[0, 9])
    text = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token(9)
    with caplog.at_level(logging.WARNING, "quire.engine"):
        assert end_tokens("auto", folder, frozenset(), VOCABULARY) == {0, 9}
    sentence = f"the end tokens 9 ({text!r}) are also text: answers end at it, and guided answers that need it fail"
    assert caplog.messages == [sentence]


def test_weights_without_a_tokenizer_end_at_the_tokens_of_their_configurations(folder: Path) -> None:
    """Engines get token ids: only gateways need the tokenizer."""
    write(folder, eos_token_id=[3])
    (folder / "tokenizer.json").unlink()
    assert end_tokens("auto", folder, frozenset(), VOCABULARY) == {3}


def test_older_tokenizers_have_their_end_token_from_transformers(tmp_path: Path) -> None:
    model = tokenizers.models.BPE({"a": 0, "<|endoftext|>": 1}, [])
    model.save(str(tmp_path))
    (tmp_path / TOKENIZER).write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}')
    assert end_tokens("auto", tmp_path, frozenset(), VOCABULARY) == {1}


def test_a_model_without_any_end_token_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert end_tokens("auto", tmp_path, frozenset(), VOCABULARY) == frozenset()
    assert "names an end token" in caplog.text
