"""Supported and refused models, with reasons, and the properties of loaded ones."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig
from transformers.utils import logging

from engine.attention.cache import CacheGeometry
from engine.errors import ModelUnsupported
from engine.model.loaded import MAX_CONTEXT_TOKENS, fingerprint
from engine.model.loading import context_tokens, load_model
from engine.model.model_shape import read_shape
from tests.engine.families import CONTEXT, GROUPED, LATER_LAYERS_WINDOWED, SMALL, WINDOW, WINDOWED, Checkpoint, Family
from tests.tiny_models import LAYERS

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
BART = SMALL | {"d_model": 64, "decoder_layers": 4, "decoder_attention_heads": 4}
MPT = {"vocab_size": 384, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 96}
XGLM = {"vocab_size": 384, "d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4}
LONGCAT = {
    **SMALL,
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 2,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
}

Tiny = Callable[[str], Path]


def load(folder: Path) -> Any:
    return load_model(folder, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "config", "reason"),
    [
        ("bart", BART | {"init_std": 0.3}, "it ignores position_ids"),
        ("bert", SMALL | {"intermediate_size": 96}, "its attention sees later tokens too"),
        (
            "bloom",
            SMALL,
            r"\(ALiBi\), .*; BloomForCausalLM computes its attention itself \(only 0 of 4 layers",
        ),
        ("falcon", SMALL, "it does not use transformers' attention interface, but selects its attention"),
        ("falcon", SMALL | {"alibi": True}, "it does not use transformers' attention interface"),
        ("gptj", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, "it does not use transformers' attention"),
        ("mpt", MPT, r"a distance bias to its scores \(ALiBi\), .*; MptForCausalLM computes its attention itself"),
        ("xglm", XGLM, r"XGLMForCausalLM computes its attention itself \(only 0 of 2 layers"),
        ("trocr", BART, "its forward call lacks logits_to_keep"),
        ("mamba", SMALL | {"state_size": 4}, "its layer 0 is of type linear_attention, which keeps a state"),
        (
            "qwen3_next",
            GROUPED | EXPERTS,
            "its layer 0 is of type linear_attention, which keeps a state",
        ),
        ("longcat_flash", LONGCAT | {"head_dim": 8}, "transformers cannot run it with its own attention either"),
        ("diffllama", GROUPED, "its layer 0 attends more than once"),
        ("hrm_text", GROUPED | {"num_hidden_layers": 2}, "its layer 0 attends more than once"),
        ("stablelm", GROUPED, "its layers do not pass the arguments of the forward call to their attention"),
        ("doge", GROUPED, "its attention uses a custom mask"),
        (
            "qwen2_moe",
            LATER_LAYERS_WINDOWED | EXPERTS,
            f"the mask of its layer 0 shows {WINDOW} tokens, but its attention is given no window",
        ),
        (
            "llama",
            WINDOWED,
            f"the mask of its layer 0 shows {CONTEXT} tokens, but its cache has a window of {WINDOW}",
        ),
    ],
)
def test_a_model_with_unsupported_attention_is_refused(
    checkpoint: Checkpoint, family: str, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelUnsupported, match=f"^{family}: .*{reason}"):
        load(checkpoint(Family(family, config)))


@pytest.fixture
def copy(tiny_model: Tiny, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model("llama"), tmp_path / "another name")


def change_config(folder: Path, old: str, new: str) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace(old, new))


def test_a_configuration_that_contradicts_itself_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint(Family("llama", GROUPED)), tmp_path / "llama")
    change_config(folder, '"num_attention_heads": 4', '"num_attention_heads": 5')
    with pytest.raises(ModelUnsupported, match=r"^llama: .*hidden size \(64\) is not a multiple"):
        load(folder)


def test_a_context_is_the_shortest_that_any_of_the_rotations_keeps_unchanged() -> None:
    growing = {"rope_type": "longrope", "original_max_position_embeddings": 100}
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 50}
    for rotations, tokens in (
        (None, 200),
        (growing, 100),
        (yarn, 200),
        ({"full_attention": growing, "sliding_attention": yarn}, 100),
    ):
        assert context_tokens(SimpleNamespace(max_position_embeddings=200, rope_parameters=rotations)) == tokens
    with pytest.raises(ModelUnsupported, match="lacks the context length"):
        context_tokens(SimpleNamespace())


def test_an_absurd_context_allocates_nothing_and_is_served_up_to_the_longest(copy: Path) -> None:
    change_config(copy, '"max_position_embeddings": 2048', f'"max_position_embeddings": {2**60}')
    assert load(copy).context_tokens == MAX_CONTEXT_TOKENS


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("model.embed_tokens.weight", float("nan"), torch.bfloat16),
        ("model.layers.1.mlp.down_proj.weight", -float("inf"), torch.float32),
        ("model.norm.weight", 70000.0, torch.float16),
    ],
)
def test_weights_that_are_not_finite_are_refused_with_their_tensor(
    copy: Path, name: str, value: float, dtype: torch.dtype
) -> None:
    weights = load_file(copy / "model.safetensors")
    weights[name].view(-1)[77] = value
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    message = f"^{copy.name}: its tensor {name} has weights that are not finite, or too large for {str(dtype)[6:]}$"
    with pytest.raises(ModelUnsupported, match=message):
        load_model(copy, dtype, torch.device("cpu"))


def test_weights_in_a_pickle_are_not_read(copy: Path) -> None:
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelUnsupported, match=f"^{copy.name}: .*no file named model.safetensors"):
        load(copy)


@pytest.mark.parametrize(("content", "name"), [("{}", "config.json"), ("not json", "config.json"), ("", "nothing")])
def test_a_folder_without_a_model_is_refused(tmp_path: Path, content: str, name: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelUnsupported, match=f"^{tmp_path.name}: "):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "geometry"),
    [
        ("llama", CacheGeometry.uniform(LAYERS, 2, 16)),
        ("gpt2", CacheGeometry.uniform(LAYERS, 4, 16)),
        ("opt", CacheGeometry.uniform(LAYERS, 4, 16)),
    ],
)
def test_geometry_context_and_vocabulary_are_those_of_the_model(
    tiny_model: Tiny, family: str, geometry: CacheGeometry
) -> None:
    loaded = load(tiny_model(family))
    assert loaded.geometry == geometry
    assert loaded.context_tokens == 2048
    assert loaded.vocabulary_size == 384
    assert loaded.eos_token_ids == {0}
    assert geometry.block_bytes(8, torch.bfloat16) == LAYERS * 2 * 8 * geometry.layers[0].kv_heads * 16 * 2


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"silu"', '"x"', "transformers knows no 'x'"),
        (
            '"rms_norm_eps": 1e-06',
            '"rms_norm_eps": 1',
            "config.json: rms_norm_eps is refused by transformers: .* float",
        ),
        ('"dtype": "float32"', '"dtype": "x"', "config.json: transformers makes no model of it .AttributeError: .*'x'"),
        ('"use_cache"', '"layer_types": [], "use_cache"', r"config.json: `num_hidden_layers` \(3\) must be equal"),
        (
            '"use_cache"',
            '"per_layer_config": {"0": {"num_key_value_heads": 1}}, "use_cache"',
            "per_layer_config gives layers different values of 'num_key_value_heads': such layers are not served",
        ),
    ],
)
def test_what_transformers_refuses_in_a_configuration_is_said_in_one_line(
    old: str, new: str, reason: str, copy: Path
) -> None:
    change_config(copy, old, new)
    with pytest.raises(ModelUnsupported, match=f"^another name: {reason}") as refused:
        load(copy)
    assert "\n" not in str(refused.value)
    with pytest.raises(ModelUnsupported, match=f"^another name: {reason}"):
        read_shape(copy, torch.float32)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[Callable[[], object]], str]]:
    """Give a function that returns what transformers logs while a function runs."""
    before = logging.get_verbosity()
    logging.set_verbosity_warning()
    logging.enable_propagation()

    def logged(run: Callable[[], object]) -> str:
        caplog.clear()
        logging.warning_once.cache_clear()
        run()
        return caplog.text

    yield logged
    logging.disable_propagation()
    logging.set_verbosity(before)


def test_nothing_is_said_of_flags_that_requests_get_but_transformers_would_ignore(
    copy: Path, warnings: Callable[[Callable[[], object]], str]
) -> None:
    (copy / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 0}')
    assert "generation flags are not valid" in warnings(lambda: GenerationConfig.from_pretrained(copy))
    assert "generation flags" not in warnings(lambda: load(copy))


def test_a_model_may_declare_many_ends_or_none(checkpoint: Checkpoint) -> None:
    for declared, ends in (([3, 5], {3, 5}), (7, {7}), (None, set())):
        family = Family("llama", GROUPED | {"eos_token_id": declared})
        assert load(checkpoint(family)).eos_token_ids == ends


class TestFingerprint:
    def test_is_the_same_for_the_same_files_in_any_folder(self, tiny_model: Tiny, copy: Path) -> None:
        original = tiny_model("llama")
        assert fingerprint(original) == fingerprint(original) == fingerprint(copy)
        assert load(copy).fingerprint == load(original).fingerprint == f"{fingerprint(copy)}-float32"

    def test_differs_between_models_and_precisions(self, tiny_model: Tiny) -> None:
        names = {fingerprint(tiny_model(family)) for family in ("llama", "gpt2", "opt")}
        assert len(names) == 3
        folder = tiny_model("llama")
        half = load_model(folder, torch.bfloat16, torch.device("cpu"))
        assert half.fingerprint == f"{fingerprint(folder)}-bfloat16"
        assert half.model.dtype == torch.bfloat16

    @pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
    def test_changes_with_the_first_and_the_last_weights(self, copy: Path, name: str) -> None:
        before = fingerprint(copy)
        weights = load_file(copy / "model.safetensors")
        weights[name].view(-1)[0] += 1
        save_file(weights, copy / "model.safetensors", {"format": "pt"})
        assert fingerprint(copy) != before

    def test_changes_with_the_configuration(self, copy: Path) -> None:
        before = fingerprint(copy)
        change_config(copy, '"rope_theta": 10000.0', '"rope_theta": 20000.0')
        assert fingerprint(copy) != before

    def test_does_not_change_with_the_tokenizer(self, copy: Path) -> None:
        before = fingerprint(copy)
        (copy / "tokenizer_config.json").write_text("{}")
        assert fingerprint(copy) == before
