"""The configuration of a model in a GGUF file: of Llama-shaped ones by own code, of others by transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

from engine.errors import ModelUnsupported
from engine.native.formats.gguf.file import rotation_factors
from engine.native.formats.gguf.header import GgufHeader, read_header
from engine.native.formats.gguf.llama_metadata import ROTATION_FACTORS
from engine.native.formats.gguf.llama_names import ARCHITECTURES, names_of
from engine.native.formats.gguf.llama_tensors import check_tensors
from engine.native.formats.gguf.metadata_sizes import check_sizes

_ROTATION_BASE = 10000.0  # of files that name none
_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
# Names of architectures in files where transformers has another one.
_OTHER_NAMES = ("qwen2moe", "qwen3moe", "minimax-m2", "t5encoder")
# transformers 5.23 knows the name, but not the tensors that llama.cpp's converter writes.
_GPT_OSS = "gpt-oss"
# Llama 3.1 and later: https://github.com/meta-llama/llama-models, `apply_scaling`. The file has its result only.
_ORIGINAL_CONTEXT, _LOW_FACTOR, _HIGH_FACTOR = 8192, 1.0, 4.0


def gguf_configuration(source: Path) -> Any:
    """Read the configuration of a GGUF file, not its weights.

    Raises ModelUnsupported if the file is damaged or cannot be served.
    """
    header = read_header(source)
    check_sizes(header)
    if header.architecture not in ARCHITECTURES:
        return _by_transformers(header, source)
    names_of(header)  # refuses shapes that contradict the metadata
    check_tensors(header)
    config = _llama_shaped(header)
    config.rope_parameters = dict(config.rope_parameters) | _scaling(config, header)
    return config


def check_read(header: GgufHeader) -> None:
    """Raise ModelUnsupported unless transformers reads files of an architecture that is not Llama's, from one file."""
    if header.architecture not in {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS, *_OTHER_NAMES}:
        instead = ": use its safetensors files in MXFP4" if header.architecture == _GPT_OSS else ""
        raise ModelUnsupported(f"its general.architecture is {header.architecture!r}, which is not read{instead}")
    if len(header.files) > 1:
        raise ModelUnsupported(
            f"models of {header.architecture} are read from one file, not from {len(header.files)} parts: merge them "
            "with llama-gguf-split --merge"
        )


def _by_transformers(header: GgufHeader, source: Path) -> Any:
    """Read the configuration of another family, of which transformers knows the keys. Raises ModelUnsupported."""
    check_read(header)
    try:
        return AutoConfig.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    except KeyError as error:
        raise ModelUnsupported(f"its metadata lacks {error.args[0]}") from error
    except (ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ModelUnsupported(f"transformers cannot read its metadata of {header.architecture}: {reason}") from error


def _llama_shaped(header: GgufHeader) -> Any:
    """Make the configuration as transformers does, but of this header: it obeys arrays, sizes of heads and biases."""
    prefix, number = header.architecture, header.number
    hidden, heads = number("embedding_length") or 0, number("attention.head_count") or 0
    ids = {role: header.metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in _ROLES.items()}
    named = {"_model_name_or_path": name} if (name := header.metadata.get("general.name")) else {}
    biased = {} if prefix == "qwen2" else {"attention_bias": "blk.0.attn_q.bias" in header.tensors}
    config = AutoConfig.for_model(
        prefix,
        vocab_size=header.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=number("attention.head_count_kv") or heads,
        max_position_embeddings=number("context_length"),
        rms_norm_eps=float(header.metadata[f"{prefix}.attention.layer_norm_rms_epsilon"]),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(header.metadata.get(f"{prefix}.rope.freq_base", _ROTATION_BASE)),
        },
        tie_word_embeddings="output.weight" not in header.tensors,
        **{f"{role}_token_id": token for role, token in ids.items() if token is not None},
        **named,
        **biased,
        **({"mlp_bias": "blk.0.ffn_gate.bias" in header.tensors} if prefix == "llama" else {}),
    )
    config.head_dim = number("attention.key_length") or hidden // heads
    return config


def _scaling(config: Any, header: GgufHeader) -> dict[str, Any]:
    """Return the parameters of scaled rotations, none if they are not. Raises ModelUnsupported for unknown factors."""
    factors, prefix = rotation_factors(header), f"{header.architecture}.rope.scaling"
    if factors is not None:
        return _llama3(config, factors)
    if header.metadata.get(f"{prefix}.type") == "linear":
        return {"rope_type": "linear", "factor": float(header.metadata.get(f"{prefix}.factor", 1.0))}
    return {}


def _llama3(config: Any, factors: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Return the parameters of Llama 3's rotations. Raises ModelUnsupported if they have other factors."""
    theta, size, factor = config.rope_parameters["rope_theta"], 2 * len(factors), float(factors.max())
    turns = _ORIGINAL_CONTEXT / (2 * np.pi * theta ** (np.arange(0, size, 2) / size))
    share = ((turns - _LOW_FACTOR) / (_HIGH_FACTOR - _LOW_FACTOR)).clip(0, 1)
    if not np.allclose(1 / ((1 - share) / factor + share), factors, rtol=1e-3):
        raise ModelUnsupported(f"tensor {ROTATION_FACTORS} has factors other than those of Llama 3.1")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FACTOR,
        "high_freq_factor": _HIGH_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_CONTEXT,
    }
