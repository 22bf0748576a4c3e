"""Writes what a Hugging Face folder has beside its weights, from a GGUF file: `python gguf_conversion.py FILE FOLDER`.

That is the configurations and the tokenizer. Weights are not read: engines map the file itself. It runs as its own
process, because transformers takes seconds and memory that its caller does not need.
"""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import ModelUnsupported
from engine.model.gguf_configuration import gguf_configuration
from services.models.files.chat_templates import TemplateSource
from services.models.files.template_language import InvalidTemplate
from services.models.gguf.tokenizer import GgufTokenizer, gguf_tokenizer


def convert(source: Path, destination: Path) -> None:
    """Write the configurations and the tokenizer of `source` to `destination`.

    Raises ModelUnsupported if the model or its file cannot be used.
    """
    config = gguf_configuration(source)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelUnsupported(f"its general.architecture is {config.model_type!r}, which does not continue texts")
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    tokenizer = gguf_tokenizer(source)
    config.save_pretrained(destination)
    _generation_config(config, tokenizer).save_pretrained(destination)
    _save(tokenizer, config, destination)


def _generation_config(config: Any, tokenizer: GgufTokenizer) -> GenerationConfig:
    """Return the defaults of generation, which ends at each of the file's ends."""
    generation = GenerationConfig.from_model_config(config)
    generation.eos_token_id = list(tokenizer.ends) or None
    return generation


def _save(tokenizer: GgufTokenizer, config: Any, destination: Path) -> None:
    settings = dict(tokenizer.settings)
    if template := settings.pop("chat_template", None):
        _check_template(template)
        (destination / "chat_template.jinja").write_text(template, encoding="utf-8")
    # GGUF keeps the context length only with the model.
    if length := getattr(config, "max_position_embeddings", None):
        settings["model_max_length"] = length
    (destination / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    tokenizer.backend.save(str(destination / "tokenizer.json"))


def _check_template(template: str) -> None:
    """Raise ModelUnsupported, with the file's key, unless a chat template is Jinja."""
    try:
        TemplateSource(template, "tokenizer.chat_template").check()
    except InvalidTemplate as error:
        raise ModelUnsupported(str(error)) from error


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
