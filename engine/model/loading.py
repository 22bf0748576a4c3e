"""Loads a model through transformers, with paged attention instead of its own."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError

from engine.attention.interface import ATTENTION_NAME, register, tune_by_positions
from engine.errors import ModelUnsupported
from engine.model.checkpoint import Checkpoint
from engine.model.decoded_weights import is_placeholder
from engine.model.gguf_configuration import check_read
from engine.model.loaded import LoadedModel, context_tokens, fingerprint_of, vocabulary_size
from engine.model.probe import probe
from engine.model.unsupported import configuration_fault
from engine.model.weights import check_complete, load_modules, without_flags_warning
from engine.native.formats.finite import check_finite
from engine.native.formats.gguf.file import gguf_of
from engine.native.formats.gguf.header import read_header
from engine.native.formats.gguf.metadata_sizes import check_sizes
from engine.native.formats.image_text import image_text_type
from engine.native.formats.quantized.methods import scheme_of
from engine.native.formats.stored import WeightFormat

# Rotations that transformers computes again for positions behind the context that is served (`context_tokens`). It
# compares them with the positions of each step.
_VARYING_ROTATIONS = ("dynamic", "longrope")


def load_model(
    folder: Path, dtype: torch.dtype, device: torch.device, weights: WeightFormat = "auto", *, packed: bool = False
) -> LoadedModel:
    """Load a Hugging Face folder. Its modules have dense weights, those that `weights` quantizes as values of `dtype`.

    `packed` says that a decoder will have the quantized weights: see `load_modules`.

    Raises ModelUnsupported with the reason if the model cannot be served.
    """
    register()
    try:
        scheme_of(folder)  # refused before files are opened
        mapped = Checkpoint.in_folder(folder)
        with without_flags_warning():
            load = partial(load_modules, weights=weights, packed=packed) if mapped else _load
            model = load(folder, dtype, device)
        check_finite((name, one) for name, one in model.named_parameters() if not is_placeholder(one))
        loaded = take(model.eval(), fingerprint_of(folder, dtype))
        return replace(loaded, folder=folder)
    except KeyError as error:
        raise ModelUnsupported(f"{folder.name}: {_unknown_name(error)}") from error
    except torch.OutOfMemoryError as error:
        raise ModelUnsupported(f"{folder.name}: its weights take more memory than the device has free") from error
    except (StrictDataclassError, AmbiguousGlobalPerLayerAttributeError) as error:
        raise ModelUnsupported(f"{folder.name}: {configuration_fault(error)}") from error
    except (ModelUnsupported, ValueError, OSError, ImportError) as error:
        raise ModelUnsupported(f"{folder.name}: {_first_line(error)}") from error


def _load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Load weights in other formats, the whole model on the host first: also GGUF files of other models."""
    if image_text_type(folder):
        raise ModelUnsupported("the text part of an image-text checkpoint is read from safetensors files only")
    gguf = gguf_of(folder)
    given: dict[str, Any] = {}
    if gguf:
        header = read_header(gguf)
        check_read(header)
        check_sizes(header)
        given = {"gguf_file": gguf.name, "quantization_config": GgufConfig(gguf_file=gguf.name, dequantize=True)}
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            output_loading_info=True,
            use_safetensors=True,  # never a pickle, which may run any code
            **given,
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # shapes that contradict the configuration
        raise ModelUnsupported(f"its files do not fit its configuration: {error}") from error
    # Old files have more tensors, such as masks. Missing ones would be random.
    check_complete(found, extras_allowed=True)
    return model.to(device)


def take(model: Any, fingerprint: str) -> LoadedModel:
    """Wrap a model that was created with attention ATTENTION_NAME, after `register`.

    Raises ModelUnsupported with the reason if it cannot be served.
    """
    config = model.config.get_text_config()
    _avoid_waits(model)
    tune_by_positions(model)
    return LoadedModel(
        model=model,
        device=model.device,
        geometry=probe(model),
        context_tokens=context_tokens(config),
        vocabulary_size=vocabulary_size(config),
        eos_token_ids=_eos_token_ids(model),
        fingerprint=fingerprint,
        dtype=model.dtype,
    )


def _avoid_waits(model: Any) -> None:
    """Let the modules of a served model neither check their rotations nor search their tokens for padding.

    Each step would wait for a GPU, although it changes nothing here.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fixed(kinds)
        elif isinstance(kinds, dict):
            module.rope_type = {layer: _fixed(kind) for layer, kind in kinds.items()}
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None


def _fixed(kind: str) -> str:
    return "default" if any(name in kind for name in _VARYING_ROTATIONS) else kind


def _eos_token_ids(model: Any) -> frozenset[int]:
    declared = model.generation_config.eos_token_id
    if declared is None:
        return frozenset()
    return frozenset(declared if isinstance(declared, list) else [declared])


def _unknown_name(error: KeyError) -> str:
    if error.args != (ATTENTION_NAME,):
        return configuration_fault(error)
    return (
        "it does not use transformers' attention interface, but selects its attention by name and has none named "
        f"{error}"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
