"""The chat template of a processor, which models of several kinds of input have beside their tokenizer."""

from pathlib import Path

from services.models.files.bounded_json import read_object

_FILE = "chat_template.json"
# Parts that configurations of models with several kinds of input have; that of the text may be the whole.
_PARTS = frozenset(("text_config", "vision_config", "audio_config"))


def processor_template(folder: Path) -> str | None:
    """Return the chat template of a processor's own file, None for a folder without one. Raises ValueError.

    transformers' processors prefer the file to `chat_template.jinja` and to the tokenizer's settings; its tokenizers do
    not read it. So it only counts for models of several kinds of input.
    """
    if not (folder / _FILE).is_file() or not _PARTS.intersection(read_object(folder / "config.json")):
        return None
    template = read_object(folder / _FILE).get("chat_template")
    if not isinstance(template, str):
        raise ValueError(f"{_FILE}: chat_template must be a text")
    return template
