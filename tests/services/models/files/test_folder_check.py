"""Damaged and hostile model folders: each is refused by file and field, within a second, before anything is loaded."""

import json
import math
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from safetensors.numpy import save_file
from transformers import CONFIG_MAPPING

from services.models.files.bounded_json import InvalidModelFile
from services.models.files.config_schema import ModelConfig, Rotation
from services.models.files.folder_check import check_configuration, check_folder, check_gguf
from tests.gguf_models import MIXED, write_llama
from tests.sound_folder import CONFIG, tensors, write_sound_folder

NAN, INFINITY = math.nan, math.inf
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]

# Of transformers' model types with a test of their own, and some others: their numbers have a schema.
FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gpt_neox", "phi3", "gpt_bigcode", "opt", "gpt2"),
    *("cohere2", "exaone4", "gemma", "gemma3_text", "glm4", "granite", "olmo2", "olmo3", "phi", "qwen3_moe"),
    *("smollm3", "starcoder2"),
)
# Numbers that no layer reads.
UNREAD = {
    *("chunk_size_feed_forward", "pretraining_tp", "summary_first_dropout", "_sliding_window_pattern"),
    *("classifier_dropout", "init_std"),
}


def each(field: str, fault: str, *values: Any) -> list[tuple[str, Any, str]]:
    return [(field, value, fault) for value in values]


# A field of config.json, its damaged value, and what is said.
NUMBERS: list[tuple[str, Any, str]] = [
    ("rope_theta", NAN, "must be a finite number, not NaN"),
    *each("rope_theta", "must be a finite number, not", INFINITY, -INFINITY),
    *each("rope_theta", "must be at least 1, not", 0, -1.0, 0.5),
    *each("rope_theta", "must be at most 1e+15, not", 1e308, 10**40),
    *each("rope_theta", "must be a number, not", "10000", [1], True, {}),
    *each("rms_norm_eps", "must be a finite number, not", NAN, INFINITY),
    *each("rms_norm_eps", "must be above 0, not", 0, 0.0, -1),
    ("rms_norm_eps", 1e30, "must be at most 1, not"),
    *each("vocab_size", "must be at least 1, not", 0, -1),
    *each("vocab_size", "must be at most 16777216, not", 10**9, 10**12),
    ("vocab_size", 5, "is 5, but tensor model.embed_tokens.weight has shape [4, 8]"),
    *each("hidden_size", "must be at least 1, not", 0, -8),
    *each("hidden_size", "must be at most 16777216, not", 10**9, 10**12, 10**400),
    ("hidden_size", 1 << 20, "is 1048576, but no dimension of its tensors is longer than 16"),
    ("hidden_size", "8", "must be an integer or an array, not a string"),
    ("hidden_size", [8, 0], "[1] must be at least 1, not 0"),
    *each("intermediate_size", "must be at ", 0, -16, 10**9, 10**12),
    ("intermediate_size", 17, "is 17, but no dimension of its tensors is longer than 16"),
    *each("num_attention_heads", "must be at ", 0, -9, 10**9),
    ("num_attention_heads", 1.5, "must be an integer or an array, not 1.5"),
    *each("num_key_value_heads", "must be at ", 0, -1, 10**9),
    ("num_key_value_heads", 3, "is 3, which 2 attention heads cannot share"),
    *each("head_dim", "must be at ", 0, -4, 10**12),
    *each("num_hidden_layers", "must be at ", 0, -1, 2000, 10**9),
    ("num_hidden_layers", 2, "is 2, but its files have tensors of 1 layers"),
    *each("max_position_embeddings", "must be at least 1, not", 0, -1),
    ("max_position_embeddings", NAN, "must be a finite number, not NaN"),
    ("max_position_embeddings", "64", "must be an integer, not a string"),
    ("sliding_window", -1, "must be at least 0, not -1"),
    ("sliding_window", "all", "must be an integer or an array, not a string"),
    ("attention_dropout", 2, "must be at most 1, not 2"),
    ("attn_logit_softcapping", 0, "must be above 0, not 0"),
    ("logits_scaling", 0, "must be above 0, not 0"),
    ("partial_rotary_factor", 1.5, "must be at most 1, not 1.5"),
    ("layer_types", "full_attention", "must be an array, not a string"),
    ("layer_types", [5], "[0] must be a string, not 5"),
    ("architectures", "LlamaForCausalLM", "must be an array, not a string"),
    ("model_type", 5, "must be a string, not 5"),
    ("model_type", None, "is missing"),
    ("eos_token_id", "x", "must be an integer or an array, not a string"),
    ("eos_token_id", -1, "must be at least 0, not -1"),
    ("eos_token_id", 4, "is 4, but vocab_size is 4"),
    ("eos_token_id", [0, 99999], "is 99999, but vocab_size is 4"),
    ("bos_token_id", 1.5, "must be an integer or an array, not 1.5"),
    ("pad_token_id", 4, "is 4, but vocab_size is 4"),
    ("num_experts_per_tok", -1, "must be at least 0, not -1"),
    ("kv_lora_rank", 0, "must be at least 1, not 0"),
    ("num_kv_shared_layers", -1, "must be at least 0, not -1"),
    ("vocab_size_per_layer_input", 0, "must be at least 1, not 0"),
    ("num_experts", 10**9, "must be at most 65536, not"),
    ("num_experts", 1000, "is 1000, but its files have 11 tensors"),
    ("moe_intermediate_size", 0, "must be at least 1, not 0"),
    ("text_config", 5, "must be an object, not 5"),
    ("quantization_config", {"bits": -4}, "bits must be above 0, not -4"),
]
# Inside of an object.
NESTED: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta must be at least 1, not 0"),
    ({"rope_parameters": {"rope_theta": NAN}}, "rope_parameters.rope_theta must be a finite number, not NaN"),
    ({"rope_parameters": {"full_attention": {"rope_theta": -1}}}, "rope_parameters.full_attention.rope_theta must be"),
    ({"rope_parameters": []}, "rope_parameters must be an object, not an array"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor must be above 0, not 0"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor must be a number, not a string"),
    ({"rope_scaling": {"type": 5}}, "rope_scaling.type must be a string, not 5"),
    ({"rope_scaling": {"low_freq_factor": -1}}, "rope_scaling.low_freq_factor must be above 0, not -1"),
    (
        {"rope_scaling": {"original_max_position_embeddings": 0}},
        "rope_scaling.original_max_position_embeddings must be",
    ),
    ({"rope_scaling": {"short_factor": [1.0, 0]}}, r"rope_scaling.short_factor\[1\] must be above 0, not 0"),
    ({"text_config": {"rms_norm_eps": 0}}, "text_config.rms_norm_eps must be above 0, not 0"),
    ({"text_config": {"vocab_size": 3, "eos_token_id": 3}}, "eos_token_id is 3, but vocab_size is 3"),
    ({"text_config": {"head_dim": 4, "num_key_value_heads": 3, "num_attention_heads": 2}}, "num_key_value_heads is 3"),
    ({"num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok is 3, but num_experts is 2"),
    ({"num_local_experts": 2, "num_experts_per_tok": 0}, "num_experts_per_tok is 0, but num_local_experts is 2"),
    ({"n_routed_experts": 6, "n_group": 4}, "n_group is 4, which does not divide n_routed_experts, 6"),
    ({"n_routed_experts": 6, "n_group": 6}, "n_group is 6, but n_routed_experts is 6: a group must have at least 2"),
    ({"n_group": 2, "topk_group": 3}, "topk_group is 3, but n_group is 2"),
    ({"qk_rope_head_dim": 5}, "qk_rope_head_dim is 5, but elements are rotated in pairs"),
    ({"layer_types": ["sliding_attention"], "sliding_window": 0}, "sliding_window must be at least 1, not 0"),
    ({"layer_types": ["sliding_attention"], "sliding_window": None}, "sliding_window must be at least 1, not null"),
    ({"num_kv_shared_layers": 1, "num_hidden_layers": 1}, "num_kv_shared_layers is 1, but num_hidden_layers is 1"),
    ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, r"its weights are quantized \(hqq, 4 bits\)"),
    ({"text_config": {"quantization_config": {"quant_method": "quanto"}}}, r"its weights are quantized \(quanto\)"),
]


def put(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def drop(*names: str) -> Damage:
    def damage(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return damage


def link(name: str, target: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def cut(name: str, size: int) -> Damage:
    return lambda folder: os.truncate(folder / name, size)


def header(entries: dict[str, Any], data: bytes = b"") -> Damage:
    content = json.dumps(entries).encode()
    return put("model.safetensors", struct.pack("<Q", len(content)) + content + data)


def entry(*, dtype: str = "F32", shape: tuple[Any, ...] = (2,), at: tuple[int, int] = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": at}


def index(**places: str) -> Damage:
    def damage(folder: Path) -> None:
        save_file(tensors(), folder / "a.safetensors", {"format": "pt"})
        (folder / "model.safetensors").unlink()
        placed = dict.fromkeys(tensors(), "a.safetensors") | {
            key.replace("__", "."): one for key, one in places.items()
        }
        (folder / INDEX).write_text(json.dumps({"weight_map": placed}))

    return damage


def piped(name: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def a_folder(name: str) -> Damage:
    return lambda folder: (folder / name).mkdir()


def linked_template(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").symlink_to("/etc/passwd")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BRACKETS = "[" * 100_000
FILES: list[tuple[Damage, str]] = [
    (drop("config.json"), "config.json is missing"),
    (put("config.json", ""), "config.json is not valid JSON: EOF while parsing a value at line 1 column 0"),
    (put("config.json", "not json"), "config.json is not valid JSON: expected ident at line 1 column 2"),
    (
        put("config.json", '{"model_type": "llama"'),
        "config.json is not valid JSON: EOF while parsing an object at line",
    ),
    (
        put("config.json", b'{"model_type": "\xff"}'),
        "config.json is not valid JSON: invalid unicode code point at line",
    ),
    (put("config.json", "[]"), "config.json must be a JSON object, not an array"),
    (put("config.json", "5"), "config.json must be a JSON object, not a number"),
    (put("config.json", BRACKETS), "config.json is nested more than 200 levels deep, at line 1 column 20"),
    (put("config.json", '{"a":' * 100_000), "config.json is nested more than 200 levels deep, at line 1 column 10"),
    (put("config.json", '{"rope_theta": 1, "rope_theta": 2}'), 'config.json has the key "rope_theta" more than once'),
    (put("config.json", '{"model_type": "llama", "own": [1e999]}'), r"config.json: own\[0\] must be a finite number"),
    (put("config.json", " " * (17 << 20)), "config.json must have at most 16777216 bytes, not 17825792"),
    (link("config.json", "/etc/passwd"), "config.json is a link out of the model's folder, to /etc/passwd"),
    (link("config.json", "nowhere.json"), "config.json is missing"),
    *(
        (link(name, name), f"^{name} is a link that leads back to itself")
        for name in ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja")
    ),
    (
        index(model__norm__weight="a" * 300 + ".safetensors"),
        "its folder lacks a+.safetensors, where model.safetensors.index.json",
    ),
    *(
        (piped(name), f"^{name} is no regular file")
        for name in (
            *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
            *("added_tokens.json", "vocab.json", "tokenizer.json", "chat_template.json", "chat_template.jinja"),
            *("additional_chat_templates/x.jinja", "model.safetensors", "model.safetensors.index.json"),
        )
    ),
    *((a_folder(name), f"^{name} is no regular file") for name in ("chat_template.jinja", "special_tokens_map.json")),
    (put("config.json", b"\xef\xbb\xbf{}"), "config.json begins with a byte order mark"),
    (put("config.json", "{}".encode("utf-16")), "config.json begins with a byte order mark"),
    (put("generation_config.json", BRACKETS), "generation_config.json is nested more than 200 levels"),
    (
        put("generation_config.json", '{"eos_token_id": "x"}'),
        "generation_config.json: eos_token_id must be an integer or",
    ),
    (
        put("generation_config.json", '{"eos_token_id": [0, "x"]}'),
        r"generation_config.json: eos_token_id\[1\] must be an",
    ),
    (put("generation_config.json", '{"eos_token_id": -1}'), "generation_config.json: eos_token_id must be at least 0"),
    (
        put("generation_config.json", '{"eos_token_id": 99999}'),
        "generation_config.json: eos_token_id is 99999, but vocab",
    ),
    (
        put("generation_config.json", '{"temperature": NaN}'),
        "generation_config.json: temperature must be a finite number",
    ),
    (
        put("generation_config.json", '{"temperature": -1}'),
        "generation_config.json: temperature must be at least 0, not",
    ),
    (put("generation_config.json", '{"top_p": 1.5}'), "generation_config.json: top_p must be at most 1, not 1.5"),
    (put("generation_config.json", '{"top_k": 0.5}'), "generation_config.json: top_k must be an integer, not 0.5"),
    (
        put("generation_config.json", '{"repetition_penalty": 0}'),
        "generation_config.json: repetition_penalty must be above",
    ),
    (
        put("generation_config.json", '{"max_new_tokens": 0}'),
        "generation_config.json: max_new_tokens must be at least 1",
    ),
    (drop("tokenizer.json"), "tokenizer.json is missing, and so is any older tokenizer: tokenizer.model, "),
    (put("tokenizer.json", BRACKETS), "tokenizer.json is nested more than 200 levels deep"),
    (put("tokenizer.json", "{}"), r"tokenizer.json: model is missing \(how words become tokens\)"),
    (
        put("tokenizer.json", '{"model": {"vocab": 5}}'),
        "tokenizer.json: model.vocab must be an object or an array, not 5",
    ),
    (cut("tokenizer.json", 200), "tokenizer.json is not valid JSON: EOF while parsing"),
    (link("tokenizer.json", "/etc/shadow"), "tokenizer.json is a link out of the model's folder, to /etc/shadow"),
    (put("tokenizer_config.json", '{"eos'), "tokenizer_config.json is not valid JSON"),
    (
        put("tokenizer_config.json", '{"eos_token": 5}'),
        "tokenizer_config.json: eos_token must be a string or an object",
    ),
    (put("tokenizer_config.json", '{"chat_template": 5}'), "tokenizer_config.json: chat_template must be a string, an"),
    (put("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}'), r"chat_template\[0\].template is missing"),
    (put("chat_template.jinja", "a\n{% endif %}"), "chat_template.jinja: line 2: Encountered unknown tag 'endif'"),
    (
        put("tokenizer_config.json", '{"model_max_length": 0}'),
        "tokenizer_config.json: model_max_length must be above 0",
    ),
    (
        put("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        "must be under the id of a token",
    ),
    (put("tokenizer_config.json", '{"added_tokens_decoder": {"1": {}}}'), "added_tokens_decoder.1.content is missing"),
    (put("special_tokens_map.json", "[]"), "special_tokens_map.json must be a JSON object, not an array"),
    (link("chat_template.jinja", "../secret"), "chat_template.jinja is a link out of the model's folder, to /"),
    (
        link("additional_chat_templates", "/etc"),
        "additional_chat_templates is a link out of the model's folder, to /etc",
    ),
    (linked_template, "additional_chat_templates/tool_use.jinja is a link out of the model's folder, to /etc/passwd"),
    (drop("model.safetensors"), "model.safetensors is missing, and so is model.safetensors.index.json or a .gguf file"),
    (pickled, "pytorch_model.bin is a pickle, which may run any code when it is read"),
    (link("model.safetensors", "/dev/zero"), "model.safetensors is a link out of the model's folder, to /dev/zero"),
    (cut("model.safetensors", 4), "model.safetensors is truncated: its header ends behind the file's end"),
    (cut("model.safetensors", 100), "model.safetensors is truncated: its header ends behind the file's end"),
    (cut("model.safetensors", 3000), r"model.safetensors is truncated: tensor model\.\S+ ends behind the file's end"),
    (put("model.safetensors", b"\xff" * 64), "model.safetensors is truncated: its header ends behind the file's end"),
    (put("model.safetensors", struct.pack("<Q", 100_000) + BRACKETS.encode()), "has a damaged header: recursion limit"),
    (header({"a": 5}), "model.safetensors has a damaged header: a is wrong"),
    (
        put("model.safetensors", struct.pack("<Q", 2) + b"[]"),
        "model.safetensors has a damaged header: it is no JSON object",
    ),
    (header({"a": entry(shape=(-1,))}), r"model.safetensors has a damaged header: a\.shape\.0 is wrong"),
    (header({"a": entry(dtype="F99")}, bytes(8)), "tensor a has 8 bytes, which are not those of F99"),
    (header({"a": entry(shape=(1 << 40, 1 << 40))}, bytes(8)), "tensor a has 8 bytes, which are not those of F32"),
    (header({"a": entry(at=(0, 1 << 50))}, bytes(8)), "model.safetensors is truncated: tensor a ends behind"),
    (header({"a": entry(at=(8, 16))}, bytes(16)), "tensor a begins at byte 8 of the data instead of 0"),
    (header({"a": entry(), "b": entry()}, bytes(8)), "tensor b begins at byte 0 of the data instead of 8"),
    (header({"a": entry()}, bytes(9)), "model.safetensors has 1 bytes behind its last tensor"),
    (
        index(model__norm__weight="../a.safetensors"),
        "places tensor model.norm.weight in '../a.safetensors', which is no",
    ),
    (
        index(model__norm__weight="/etc/passwd"),
        "places tensor model.norm.weight in '/etc/passwd', which is no safetensors file of",
    ),
    (index(model__norm__weight="b.safetensors"), "its folder lacks b.safetensors, where model.safetensors.index.json"),
    (index(other="a.safetensors"), "model.safetensors.index.json places tensor other in a.safetensors, which lacks it"),
    (
        lambda folder: [index()(folder), put(INDEX, BRACKETS)(folder)],
        "model.safetensors.index.json is nested more than",
    ),
]


def refusal(folder: Path) -> str:
    """Return why a folder is refused, in a second of this thread."""
    begun = time.thread_time()
    with pytest.raises(InvalidModelFile) as refused:
        check_folder(folder)
    assert time.thread_time() - begun < 1
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_a_sound_folder_is_accepted(tmp_path: Path) -> None:
    check_folder(write_sound_folder(tmp_path))


def test_what_is_left_out_or_null_is_no_damage(tmp_path: Path) -> None:
    folder = write_sound_folder(tmp_path, rope_scaling=None, head_dim=None, num_key_value_heads=None, own=[1, None])
    for name in ("generation_config.json", "tokenizer_config.json"):
        (folder / name).unlink()
    check_folder(folder)


@pytest.mark.parametrize(("field", "value", "fault"), NUMBERS)
def test_a_number_out_of_bounds_is_refused_by_its_field(field: str, value: Any, fault: str, tmp_path: Path) -> None:
    folder = write_sound_folder(tmp_path, **{field: value})
    assert re.match(rf"config\.json: {field}.*{re.escape(fault)}", refusal(folder))


@pytest.mark.parametrize(("changed", "fault"), NESTED)
def test_a_number_inside_of_an_object_is_refused_by_its_path(
    changed: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    assert re.match(f"config.json: {fault}", refusal(write_sound_folder(tmp_path, **changed)))


@pytest.mark.parametrize(("damage", "fault"), FILES, ids=[fault for _, fault in FILES])
def test_a_damaged_file_is_refused_by_its_name_and_place(damage: Damage, fault: str, tmp_path: Path) -> None:
    folder = write_sound_folder(tmp_path / "model")
    damage(folder)
    assert re.search(fault, refusal(folder))


def test_an_adapter_is_refused_with_its_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "base_model_name_or_path": "org/base"}')
    assert "the folder has an adapter of org/base, which is not served" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 0}')
    assert refusal(tmp_path).startswith("adapter_config.json: r must be at least 1, not 0 (the rank)")


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("llama.rope.freq_base", NAN, "rope.freq_base must be a finite number, not NaN"),
        ("llama.rope.freq_base", 0.0, "rope.freq_base must be at least 1, not 0.0"),
        ("llama.attention.layer_norm_rms_epsilon", -1.0, "attention.layer_norm_rms_epsilon must be above 0, not -1.0"),
        ("llama.block_count", 10**9, "block_count must be at most 1024, not 1000000000"),
        ("llama.attention.head_count", 0, "attention.head_count must be at least 1, not 0"),
        ("llama.embedding_length", 1 << 20, "its llama.embedding_length is 1048576, but no dimension"),
        ("llama.context_length", 0, "context_length must be at least 1, not 0"),
    ],
)
def test_a_number_of_a_gguf_file_is_refused_by_its_key(key: str, value: float, fault: str, tmp_path: Path) -> None:
    def damage(writer: gguf.GGUFWriter) -> None:
        kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
        for data in writer.kv_data:
            data[key] = gguf.GGUFValue(value, kind)

    path = write_llama(tmp_path / "tiny.gguf", MIXED, change=damage)
    with pytest.raises(InvalidModelFile, match=f"^tiny.gguf: {fault}"):
        check_gguf(path)


@pytest.mark.parametrize("key", ["attention.sliding_window", "attention.key_length", "expert_count", "block_count"])
def test_an_array_in_place_of_a_number_is_refused_by_its_key(key: str, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", MIXED, change=lambda writer: writer.add_array(f"llama.{key}", [4, 4]))
    sentence = f"^tiny.gguf: its llama.{re.escape(key)} is an array, and only one number for all layers is read"
    with pytest.raises(InvalidModelFile, match=sentence):
        check_gguf(path)


def test_links_within_the_folder_and_to_the_blobs_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    folder = write_sound_folder(tmp_path / "models--org--tiny" / "snapshots" / "abc")
    blobs = tmp_path / "models--org--tiny" / "blobs"
    blobs.mkdir()
    (folder / "config.json").rename(blobs / "1234")
    (folder / "config.json").symlink_to("../../blobs/1234")
    (folder / "..data").mkdir()  # as Kubernetes mounts volumes
    (folder / "tokenizer.json").rename(folder / "..data" / "tokenizer.json")
    (folder / "tokenizer.json").symlink_to("..data/tokenizer.json")
    check_folder(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_number_of_a_tested_family_has_a_schema_and_a_sentence(name: str, tmp_path: Path) -> None:
    made = CONFIG_MAPPING[name]()
    numbers = {key for key, one in made.to_dict().items() if type(one) in (int, float)} - UNREAD
    assert {key for key in numbers if not key.endswith("_token_id")} <= ModelConfig.model_fields.keys()
    rotations = (made.to_dict().get("rope_parameters") or {}).keys() - {"full_attention", "sliding_attention"}
    assert rotations <= Rotation.model_fields.keys()
    made.eos_token_id = None  # that of StarCoder2's defaults is beyond their vocabulary
    made.save_pretrained(tmp_path)
    check_configuration(tmp_path)


def test_every_field_of_the_schema_has_a_sentence() -> None:
    assert all(field.description for field in ModelConfig.model_fields.values())
    assert CONFIG.keys() <= ModelConfig.model_fields.keys() | {"hidden_act", "tie_word_embeddings"}
