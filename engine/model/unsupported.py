"""Explains by its architecture why a model cannot be served; the failed check only shows a symptom."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError

from engine.attention.llama_shape import is_llama_shaped

KNOWN_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
_STATES = ("linear", "mamba", "recurrent", "conv", "ssm", "hybrid")
# Names of attention modules in such plans.
_ATTENTION = re.compile(r"\.(self_)?(attn|attention)\.")
NO_KEPT_LOGITS = "its forward call lacks logits_to_keep, so it computes logits for every token"
NO_MASK = "its attention sees later tokens too, or masks them in a way that paged attention does not support"


def unknown_layer(config: Any) -> str:
    """Return the fault of the first layer of an unknown type, empty if there is none."""
    for layer, kind in enumerate((getattr(config, "layer_types", None) or ())[: config.num_hidden_layers]):
        if kind not in KNOWN_LAYERS:
            return f"its layer {layer} is of type {kind}, {_of_kind(kind)}"
    return ""


def explain(model: Any, fault: str) -> str:
    """Return why a model is rejected: properties of its architecture, and the fault that a check found."""
    reasons = "; ".join(_reasons(model, model.config.get_text_config(), fault))
    return f"{reasons} ({fault})" if reasons else fault


def unlike_served(model: Any) -> str:
    """Return what makes a model unlike those that are served, without running it; empty if nothing is known."""
    reasons = list(_of_architecture(model, model.config.get_text_config()))
    if not reasons and "logits_to_keep" not in inspect.signature(model.forward).parameters:
        reasons = [NO_KEPT_LOGITS]
    return "; ".join(reasons)


def configuration_fault(error: Exception) -> str:
    """Return in one line what transformers refuses in a configuration, which may make it raise anything."""
    text = " ".join(str(error.__cause__ if isinstance(error, StrictDataclassError) else error).split())
    field = re.match(r"Validation error for field '([\w.]+)'", str(error))
    match error:
        case StrictDataclassError():
            return f"{field[1]} is refused by transformers: {text}" if field else text
        case AmbiguousGlobalPerLayerAttributeError():
            return f"per_layer_config gives layers different values of {text.split()[0]}: such layers are not served"
        case KeyError():
            return f"transformers knows no {text}"
        case ValueError() | OSError() | ImportError():
            return str(error).strip().partition("\n")[0]
    return f"transformers makes no model of it ({type(error).__name__}: {text})"


def unshared(model: Any, *, from_gguf: bool, image_text: bool, quantized: bool = False) -> str:
    """Return why several ranks cannot share a model, empty if they can. Needs no weights.

    Quire's decoder slices Llama-shaped models. Others are sliced by the plan that transformers has for them, which must
    give each rank heads of its own: `colwise` does, a gathered output does not.
    """
    if is_llama_shaped(model):
        return ""
    if from_gguf:
        return "of GGUF files, several ranks can share Llama-shaped models only"
    if quantized:
        return "of quantized weights, several ranks can share Llama-shaped models only"
    if image_text:
        return "of image-text checkpoints, several ranks can share Llama-shaped text parts only"
    kind = model.config.get_text_config().model_type
    if not model.tp_plan:
        return f"transformers has no tensor-parallel plan for models of type {kind!r}: tensor_parallel must be 1"
    if not any(style == "colwise" and _ATTENTION.search(name) for name, style in model.tp_plan.items()):
        return (
            f"transformers' tensor-parallel plan for models of type {kind!r} keeps all heads on every rank: "
            "tensor_parallel must be 1"
        )
    return ""


def _reasons(model: Any, config: Any, fault: str) -> Iterator[str]:
    yield from _of_architecture(model, config)
    if type(model)._can_set_attn_implementation() and not _runs(model):
        yield "transformers cannot run it with its own attention either"
    if getattr(config, "kv_lora_rank", None) and "differ" in fault:
        yield f"it has multi-head latent attention (kv_lora_rank is {config.kv_lora_rank})"
    if fault == NO_MASK and getattr(config, "is_decoder", None) is False:
        yield "it is an encoder (is_decoder is false in its configuration)"


def _of_architecture(model: Any, config: Any) -> Iterator[str]:
    if _has_alibi(model, config):
        yield "it adds a distance bias to its scores (ALiBi), which transformers' attention interface does not receive"
    if not type(model)._can_set_attn_implementation():
        yield f"{type(model).__name__} computes its attention itself"


def _of_kind(kind: str) -> str:
    if any(word in kind for word in _STATES):
        return "which keeps a state besides or instead of keys and values: a paged cache cannot hold it"
    return "which paged attention does not support"


def _has_alibi(model: Any, config: Any) -> bool:
    made_here = (name for module in model.modules() for name in vars(type(module)))
    return getattr(config, "alibi", None) is True or any("alibi" in name for name in made_here)


def _runs(model: Any) -> bool:
    """Return whether transformers can run the model with its own attention, which is left enabled."""
    try:
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device=model.device), use_cache=False)
    except Exception:  # remote model code may raise anything
        return False
    return True
