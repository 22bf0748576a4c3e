"""Writes what a Hugging Face folder has beside its weights, from a GGUF file: `python gguf_conversion.py FILE FOLDER`.

That is the configurations and the tokenizer. Weights are not read: engines map the file itself. It runs as its own
process, because transformers takes seconds and memory that its caller does not need.
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import ModelUnsupported
from engine.model.gguf_configuration import gguf_configuration


def convert(source: Path, destination: Path) -> None:
    """Write the configurations and the tokenizer of `source` to `destination`.

    Raises ModelUnsupported, and errors of transformers, if the model or its file cannot be used.
    """
    config = gguf_configuration(source)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # GGUF keeps the context length only with the model; a tokenizer without one reports 10^30 tokens.
    tokenizer.model_max_length = getattr(config, "max_position_embeddings", tokenizer.model_max_length)
    config.save_pretrained(destination)
    GenerationConfig.from_model_config(config).save_pretrained(destination)
    tokenizer.save_pretrained(destination)


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
