"""Special tokens that a model folder names beside its `tokenizer.json`, which need not mark them as special."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.models.files.bounded_json import read_object
from services.models.files.schemas import TokenizerConfig, check_schema


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a tokenizer; empty for a folder without any. Raises InvalidModelFile."""
    return _json(folder / "special_tokens_map.json") | _json(folder / "tokenizer_config.json")


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by role: all settings whose name ends with `_token`."""
    contents = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
    return {name: content for name, content in contents.items() if content is not None}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = read_object(path)
    check_schema(path.name, TokenizerConfig, found)
    return found


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
