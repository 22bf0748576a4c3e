"""The configuration of a model in a GGUF file: by transformers, and what it does not read by own code."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoConfig

from engine.errors import ModelUnsupported
from engine.native.formats.gguf_file import rotation_factors
from engine.native.formats.gguf_header import GgufHeader, read_header
from engine.native.formats.llama_names import ARCHITECTURES, ROTATION_FACTORS, names_of
from engine.native.formats.metadata_sizes import check_sizes

# Llama 3.1 and later: https://github.com/meta-llama/llama-models, `apply_scaling`. The file has its result only.
_ORIGINAL_CONTEXT, _LOW_FACTOR, _HIGH_FACTOR = 8192, 1.0, 4.0


def gguf_configuration(source: Path) -> Any:
    """Read the configuration of a GGUF file, not its weights.

    Raises ModelUnsupported if the file is damaged or cannot be served, and errors of transformers.
    """
    header = read_header(source)
    check_sizes(header)
    if header.architecture in ARCHITECTURES:
        names_of(header)  # refuses shapes that contradict the metadata
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    if header.architecture in ARCHITECTURES:
        _complete(config, header, source)
    return config


def _complete(config: Any, header: GgufHeader, source: Path) -> None:
    """Set biases, sizes of heads, and scaled rotations, which transformers does not read. Raises ModelUnsupported."""
    if hasattr(config, "attention_bias"):
        config.attention_bias = "blk.0.attn_q.bias" in header.tensors
    config.head_dim = header.number("attention.key_length") or config.hidden_size // config.num_attention_heads
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    factors = rotation_factors(source, header)
    if factors is not None:
        config.rope_parameters = dict(config.rope_parameters) | _llama3(config, factors)
    elif scaling == "linear":
        factor = float(header.metadata.get(f"{header.architecture}.rope.scaling.factor", 1.0))
        config.rope_parameters = dict(config.rope_parameters) | {"rope_type": "linear", "factor": factor}
    elif scaling != "none":
        key = f"{header.architecture}.rope.scaling.type"
        raise ModelUnsupported(f"its {key} is {scaling!r}, and such rotations are not read from GGUF files")


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
