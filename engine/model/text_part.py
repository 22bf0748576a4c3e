"""The model that is served of a configuration: of images and text, the text part.

Text alone has the same position in all three rows of M-RoPE (Qwen2-VL, https://arxiv.org/abs/2409.12191), so that it
is RoPE, and the text models that have it equal plain ones.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.errors import ModelUnsupported
from engine.model.unsupported import configuration_fault
from engine.native.formats.image_text import IMAGE_TEXT_TYPES
from engine.native.formats.quantized.declared import FIELDS as QUANTIZATION_FIELDS

# The plain type of text models with M-RoPE, and what their configurations do not say.
_PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
    "glm4v_text": ("glm4", {"attention_bias": True}),
    "glm4v_moe_text": ("glm4_moe", {}),
}
# Sizes that only configurations of text models have. Files of LLaVA's authors have them without a text_config, where
# transformers would take the defaults.
_TEXT_FIELDS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "rms_norm_eps")
_OWN_FIELDS = ("model_type", "architectures", "base_config_key", "transformers_version")


def folder_configuration(folder: Path) -> Any:
    """Return transformers' configuration of a folder. Raises ModelUnsupported with the field that it refuses."""
    try:
        return without_quantization(AutoConfig.from_pretrained(folder, local_files_only=True))
    except Exception as error:  # the classes compute with values as they are
        raise ModelUnsupported(f"config.json: {configuration_fault(error)}") from error


def without_quantization(config: Any) -> Any:
    """Drop what a configuration declares of quantized weights: modules get dense ones, from `Checkpoint`."""
    for part in (config, config.get_text_config()):
        for name in QUANTIZATION_FIELDS:
            vars(part).pop(name, None)
    return config


def served_class(config: Any) -> tuple[Any, Any]:
    """Return transformers' class of the model that is served, and its configuration. Raises ModelUnsupported."""
    if config.model_type in IMAGE_TEXT_TYPES:
        return _text_class(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelUnsupported(f"models of type {config.model_type!r} are no causal language models of transformers")
    kind = _kind(config)
    text = config.sub_configs.get("text_config")
    return kind, config.get_text_config() if text and kind.config_class is text else config


def _text_class(whole: Any) -> tuple[Any, Any]:
    _check_inner(whole, whole.get_text_config())
    text = _plain(whole.get_text_config())
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelUnsupported(
            f"of models of type {whole.model_type!r} the text part is served, but a text part of type "
            f"{text.model_type!r} is no causal language model of transformers"
        )
    if (tied := getattr(whole, "tie_word_embeddings", None)) is not None:
        text.tie_word_embeddings = tied  # the head is outside the text part
    return _kind(text), text


def _kind(config: Any) -> Any:
    """Return the class of a causal language model: of several, the declared one or the first."""
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(kinds, list | tuple):
        return kinds
    declared = getattr(config, "architectures", None) or ()
    return next((kind for kind in kinds if kind.__name__ in declared), kinds[0])


def _check_inner(whole: Any, text: Any) -> None:
    """Raise ModelUnsupported if a configuration has other sizes than its part for text."""
    for name in _TEXT_FIELDS:
        outer, inner = vars(whole).get(name), getattr(text, name, None)
        if outer is not None and inner is not None and outer != inner:
            raise ModelUnsupported(f"its configuration has {name} {outer}, but its text_config {inner}")


def _plain(text: Any) -> Any:
    """Return a copy of a text configuration, that of a plain model for one with M-RoPE."""
    if text.model_type not in _PLAIN:
        return deepcopy(text)
    name, unsaid = _PLAIN[text.model_type]
    fields = {key: value for key, value in text.to_dict().items() if key not in _OWN_FIELDS}
    rotation = {key: value for key, value in fields["rope_parameters"].items() if not key.startswith("mrope")}
    rotation.setdefault("partial_rotary_factor", 1.0)
    size = fields.get("head_dim") or text.hidden_size // text.num_attention_heads
    plain = CONFIG_MAPPING[name](**fields | unsaid | {"rope_parameters": rotation, "head_dim": size})
    if text.model_type == "qwen3_vl_moe_text":
        plain.model_type = "qwen3_vl_moe"  # by which transformers finds how to turn the experts that its files stack
    return plain
