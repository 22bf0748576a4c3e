"""Special tokens that a model folder names beside its `tokenizer.json`, which need not mark them as special.

Transformers 5 decides which file counts (`PreTrainedTokenizerBase._from_pretrained`): with `added_tokens_decoder` in
`tokenizer_config.json` that file alone, otherwise `special_tokens_map.json` before it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.models.files.bounded_json import read_object
from services.models.files.schemas import TokenizerConfig, check_schema

# Roles in the order in which transformers gives ids to new tokens; further ones follow.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = "extra_special_tokens"
# The name of earlier versions.
_ADDITIONAL = "additional_special_tokens"
# Extra tokens that have names.
_NAMED_EXTRA = "model_specific_special_tokens"


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a tokenizer; empty for a folder without any. Raises InvalidModelFile.

    Extra tokens with names are in `model_specific_special_tokens`, others in `extra_special_tokens`.
    """
    settings = _json(folder / "tokenizer_config.json")
    if not settings.get(_EXTRA):
        settings = _renamed(settings)
    settings = _split(settings)
    if "added_tokens_decoder" not in settings:
        settings = _with_legacy(settings, _json(folder / "special_tokens_map.json"))
    # Names in the extra tokens leave their place to tokens of the earlier name.
    return settings if _EXTRA in settings else _renamed(settings)


def named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by role: all settings whose name ends with `_token`, and named extra tokens."""
    contents = {name: _content(value) for name, value in named_values(settings)}
    return {name: content for name, content in contents.items() if content is not None}


def named_values(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return role and setting, a text or the fields of a token, of the special tokens with a role, in their order."""
    roles = {name: value for name, value in settings.items() if name.endswith("_token")}
    ordered = {name: roles[name] for name in _ROLES if name in roles} | roles
    return [*(ordered | (settings.get(_NAMED_EXTRA) or {})).items()]


def _renamed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings whose extra tokens have the present name."""
    if _ADDITIONAL not in settings:
        return settings
    return _without(settings, _ADDITIONAL) | {_EXTRA: settings[_ADDITIONAL]}


def _with_legacy(settings: dict[str, Any], legacy: Mapping[str, Any]) -> dict[str, Any]:
    """Let the values of `special_tokens_map.json` replace those of the settings; lists of extra tokens are joined."""
    merged = settings | {name: value if name == _EXTRA else _special(value) for name, value in legacy.items()}
    if isinstance(further := legacy.get(_EXTRA), list):
        listed = settings.get(_EXTRA) or []
        merged[_EXTRA] = [*listed, *(token for one in further if (token := _special(one)) not in listed)]
    if not isinstance(named := merged.get(_EXTRA), dict):
        return merged
    return _without(merged, _EXTRA) | {_NAMED_EXTRA: (settings.get(_NAMED_EXTRA) or {}) | named}


def _special(value: Any) -> Any:
    return value | {"special": True} if isinstance(value, dict) and "content" in value else value


def _split(settings: dict[str, Any]) -> dict[str, Any]:
    """Move extra tokens that have names, and those of roles that not all models have."""
    further = {
        name: value
        for name, value in settings.items()
        if name.endswith("_token") and name not in _ROLES and isinstance(value, str)
    }
    if isinstance(extra := settings.get(_EXTRA), dict):
        further, settings = further | extra, _without(settings, _EXTRA)
    return _without(settings, *further) | {_NAMED_EXTRA: further} if further else settings


def _without(settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = read_object(path)
    check_schema(path.name, TokenizerConfig, found)
    return found


def _content(token: object) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
