"""What a GGUF file declares and its tensors contradict, arrays in place of numbers, and long chat templates."""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.errors import ModelUnsupported
from services.models.files.bounded_json import InvalidModelFile
from services.models.files.folder_check import check_folder
from services.models.files.template_language import MAX_SOURCE_CHARACTERS
from services.models.gguf.file_check import check_gguf
from services.models.gguf_conversion import convert
from tests.gguf_models import (
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    MIXED,
    VOCABULARY,
    Changes,
    write_gpt2,
    write_llama,
)

EXPERTS = 4
GATES = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def experts(writer: gguf.GGUFWriter, count: int = EXPERTS, inside: int = INTERMEDIATE) -> None:
    """Add matrices of experts to each layer."""
    for layer in range(LAYERS):
        for name in GATES:
            shape = (count, HIDDEN, inside) if "down" in name else (count, inside, HIDDEN)
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.zeros(shape, np.float16))


def declared(count: int, used: int, inside: int | None = None, *, tensors: bool = True) -> Changes:
    """Declare experts, and add them."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(count)
        writer.add_expert_used_count(used)
        if inside is not None:
            writer.add_expert_feed_forward_length(inside)
        if tensors:
            experts(writer)

    return change


CONTRADICTIONS: dict[str, Changes] = {
    r"its gpt2\.expert_count is 4, but it has no tensors of experts \(blk\.\*\.ffn_\*_exps\.weight\)": (
        declared(EXPERTS, 2, tensors=False)
    ),
    r"tensor blk\.0\.ffn_gate_exps\.weight has shape \(4, 256, 256\), but its gpt2\.expert_count is 0": experts,
    r"tensor blk\.0\.ffn_gate_exps\.weight has shape \(4, 256, 256\), but its gpt2\.expert_count is 8": declared(8, 2),
    r"its gpt2\.expert_used_count is 5, but its gpt2\.expert_count is 4": declared(EXPERTS, 5),
    r"its gpt2\.expert_used_count is 0, but its gpt2\.expert_count is 4": declared(EXPERTS, 0),
    r"its gpt2\.expert_used_count is 1, but its gpt2\.expert_count is 0": declared(0, 1, tensors=False),
    r"tensor blk\.0\.ffn_gate_exps\.weight has shape .*, but its gpt2\.expert_feed_forward_length is 128": (
        declared(EXPERTS, 2, 128)
    ),
    r"its gpt2\.vocab_size is 300, but tensor token_embd\.weight has 384 rows": lambda file: file.add_vocab_size(300),
    r"its tokenizer\.ggml\.fim_mid_token_id is 384, but it has 384 tokens": (
        lambda file: file.add_uint32("tokenizer.ggml.fim_mid_token_id", VOCABULARY)
    ),
    r"its tokenizer\.ggml\.tokens has 3 elements, but tensor token_embd\.weight has 384 rows": (
        lambda file: file.add_token_list(["a", "b", "ab"])
    ),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_metadata_that_the_tensors_of_any_family_contradict_are_refused_by_key(tmp_path: Path, message: str) -> None:
    path = write_gpt2(tmp_path / "tiny.gguf", CONTRADICTIONS[message])
    with pytest.raises(InvalidModelFile, match=rf"^tiny\.gguf: {message}$"):
        check_gguf(path)


def test_experts_that_fit_their_tensors_are_not_refused(tmp_path: Path) -> None:
    check_gguf(write_gpt2(tmp_path / "tiny.gguf", declared(EXPERTS, 2, INTERMEDIATE)))


@pytest.mark.parametrize("tensors", [True, False])
def test_experts_of_a_llama_are_not_served_as_a_dense_model(tmp_path: Path, tensors: bool) -> None:
    change = declared(EXPERTS, 2, tensors=tensors)
    path = write_llama(tmp_path / "tiny.gguf", MIXED, change=change, without=("blk.0.ffn", "blk.1.ffn"))
    sentence = "expert_count is 4, but " + ("only 0 is served" if tensors else "it has no tensors of experts")
    with pytest.raises(InvalidModelFile, match=rf"^tiny\.gguf: its llama\.{sentence}"):
        check_gguf(path)


def written(path: Path, change: Changes) -> dict[str, str]:
    """Return what is written for a file, which is checked before."""
    folder = path / "folder"
    file = write_llama(path / "tiny.gguf", MIXED, change=change)
    check_gguf(file)
    convert(file, folder)
    found = {one.name: one.read_text() for one in folder.iterdir()}
    (folder / file.name).symlink_to(file)
    check_folder(folder)
    return found


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention.head_count", 4), ("attention.head_count_kv", KV_HEADS), ("feed_forward_length", INTERMEDIATE)],
)
def test_an_array_with_one_number_for_each_layer_is_read_as_that_number(tmp_path: Path, key: str, value: int) -> None:
    for name in ("plain", "array"):
        (tmp_path / name).mkdir()
    plain = written(tmp_path / "plain", lambda _file: None)
    assert written(tmp_path / "array", lambda file: file.add_array(f"llama.{key}", [value] * LAYERS)) == plain
    for other in ([value, 2 * value], [value] * (LAYERS + 1), [value]):
        with pytest.raises(InvalidModelFile, match=f"its llama.{re.escape(key)} is an array, and only one number for"):
            written(tmp_path / "array", lambda file: file.add_array(f"llama.{key}", other))  # noqa: B023 - called here


def test_an_array_of_another_family_is_refused_because_transformers_would_keep_it(tmp_path: Path) -> None:
    path = write_gpt2(tmp_path / "tiny.gguf", lambda file: file.add_array("gpt2.attention.head_count", [4, 4]))
    with pytest.raises(InvalidModelFile, match=r"^tiny\.gguf: its gpt2\.attention\.head_count is an array"):
        check_gguf(path)


def test_a_long_chat_template_is_kept_whole_and_a_longer_one_refused(tmp_path: Path) -> None:
    longest = "\N{SNOWMAN}" * MAX_SOURCE_CHARACTERS  # three bytes each
    assert written(tmp_path, lambda file: file.add_chat_template(longest))["chat_template.jinja"] == longest
    for count in (1, 1_000_000, 10_000_000):
        path = write_llama(
            tmp_path / f"{count}.gguf",
            MIXED,
            change=lambda file: file.add_chat_template(longest + "a" * count),  # noqa: B023
        )
        with pytest.raises(InvalidModelFile, match=rf"^{count}\.gguf: tokenizer\.chat_template: it must have at most"):
            check_gguf(path)


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.pre", "llama.rope.scaling.type"])
def test_another_text_that_is_too_long_is_not_taken_for_a_missing_one(tmp_path: Path, key: str) -> None:
    def change(file: gguf.GGUFWriter) -> None:
        file.kv_data[0].pop(key, None)
        file.add_string(key, "llama" * 20_000)

    with pytest.raises((InvalidModelFile, ModelUnsupported), match=re.escape(key)):
        written(tmp_path, change)


def test_a_number_without_the_name_of_the_architecture_is_another_key(tmp_path: Path) -> None:
    assert "config.json" in written(tmp_path, lambda file: file.add_string("block_count", "many"))
    path = write_llama(
        tmp_path / "bad.gguf",
        MIXED,
        change=lambda file: (file.add_uint32("llama.vocab_size", 0), file.add_uint32("vocab_size", VOCABULARY))[0],
    )
    with pytest.raises(InvalidModelFile, match=r"^bad\.gguf: vocab_size must be at least 1, not 0"):
        check_gguf(path)
