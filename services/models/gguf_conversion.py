"""Writes what a Hugging Face folder has beside its weights, from a GGUF file: `python gguf_conversion.py FILE FOLDER`.

That is the configurations and the tokenizer. Weights are not read: engines map the file itself. It runs as its own
process, because transformers takes seconds and memory that its caller does not need.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import ModelUnsupported
from engine.native.formats.gguf_file import rotation_factors
from engine.native.formats.gguf_header import GgufHeader, read_header
from engine.native.formats.llama_names import ARCHITECTURES, ROTATION_FACTORS, names_of

# Llama 3.1 and later: https://github.com/meta-llama/llama-models, `apply_scaling`. The file has its result only.
_ORIGINAL_CONTEXT, _LOW_FACTOR, _HIGH_FACTOR = 8192, 1.0, 4.0


def convert(source: Path, destination: Path) -> None:
    """Write the configurations and the tokenizer of `source` to `destination`.

    Raises ModelUnsupported, and errors of transformers, if the model or its file cannot be used.
    """
    header = read_header(source)
    if header.architecture in ARCHITECTURES:
        names_of(header)  # refuses shapes that contradict the metadata
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    if header.architecture in ARCHITECTURES:
        _complete(config, header, source)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # GGUF keeps the context length only with the model; a tokenizer without one reports 10^30 tokens.
    tokenizer.model_max_length = getattr(config, "max_position_embeddings", tokenizer.model_max_length)
    config.save_pretrained(destination)
    GenerationConfig.from_model_config(config).save_pretrained(destination)
    tokenizer.save_pretrained(destination)


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
        raise ModelUnsupported(f"its rotations are scaled by {scaling!r}, which is not read from GGUF files")


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


def main() -> int:
    """Convert the file named on the command line; return the exit status."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except ModelUnsupported as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
