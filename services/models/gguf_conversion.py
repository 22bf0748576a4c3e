"""Converts a GGUF file to a Hugging Face folder: `python gguf_conversion.py FILE FOLDER`.

It runs as its own process, because torch and transformers take seconds and gigabytes that its caller does not need.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils.logging import disable_progress_bar


def convert(source: Path, destination: Path) -> None:
    """Write the model and the tokenizer of `source` to `destination`, with the weights in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=source.name, dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # GGUF keeps the context length only with the model; a tokenizer without one reports 10^30 tokens.
    tokenizer.model_max_length = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    for file in destination.iterdir():
        file.chmod(0o644)  # save_pretrained makes the weights readable for their owner only


if __name__ == "__main__":
    disable_progress_bar()
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
