"""Loads the tokenizer of a model folder as Hugging Face Transformers' AutoTokenizer does.

`tokenizer.json` need not have all tokens: `added_tokens_decoder`, `extra_special_tokens` and the roles such as
`eos_token` of `tokenizer_config.json` add further ones, which take the next ids.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import tokenizers

from services.models.files.bounded_json import MOST_TOKENIZER_BYTES, InvalidModelFile, read_object
from services.models.files.chat_templates import ChatTemplates, read_templates
from services.models.files.template_language import InvalidTemplate
from services.models.tokenizer_settings import named_tokens, named_values, tokenizer_settings

_FILE = "tokenizer_config.json"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
# Classes of transformers that take `add_prefix_space` from their settings, whatever `tokenizer.json` has.
_PREFIXING = ("GPT2", "GPTNeoX", "CodeGen", "Qwen2", "Roberta", "Bart")
# Parts of `tokenizer.json` that may be missing.
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
_MAX_TOKENS = 65_536
_MAX_CHARACTERS = 1024

_Settings = Mapping[str, Any]


class InvalidTokenizer(ValueError):
    """A folder has no tokenizer, or its files contradict each other. The message names the file and the field."""


class LoadedTokenizer(NamedTuple):
    """A tokenizer, its special tokens by role (variables of its chat templates), and these templates."""

    backend: tokenizers.Tokenizer
    named: dict[str, str]
    templates: ChatTemplates


def load_tokenizer(folder: Path) -> LoadedTokenizer:
    """Read the tokenizer and the chat templates of a model folder. Raises InvalidTokenizer."""
    try:
        settings = tokenizer_settings(folder)
        templates = read_templates(folder, settings.get("chat_template"))
        backend, named = _from_json(folder, settings) if (folder / "tokenizer.json").is_file() else _converted(folder)
    except (InvalidTokenizer, InvalidTemplate, InvalidModelFile) as error:
        raise InvalidTokenizer(str(error)) from error
    except BaseException as error:  # `tokenizers` raises nothing more precise
        if not _is_of_tokenizers(error):
            raise
        raise InvalidTokenizer(f"No tokenizer can be read from {folder}: {error}") from error
    return LoadedTokenizer(backend, named, templates)


def _converted(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Convert older files, such as `vocab.json` or `tokenizer.model`, to a fast tokenizer."""
    from transformers import AutoTokenizer  # imported here because it takes seconds

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return loaded.backend_tokenizer, loaded.special_tokens_map


def _from_json(folder: Path, settings: _Settings) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    backend = _read(folder / "tokenizer.json")
    _set_prefix_space(backend.pre_tokenizer, settings)
    own_size = backend.get_vocab_size(with_added_tokens=True)
    declared = _declared(settings)
    missing = {at: token for at, token in declared.items() if backend.token_to_id(token.content) is None}
    roles, extra = _roles(settings), [*_extra(settings)]
    known = _added_names(backend)
    legacy = [token for token in _legacy_tokens(folder, settings) if token.content not in known]
    _add(backend, [*declared.values(), *legacy], roles, extra)
    for at, token in missing.items():
        _check_id(backend, at, token.content)
    _check_rows(backend, folder, own_size, {token.content for token in (*missing.values(), *extra)})
    return backend, named_tokens(settings)


def _read(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer. Raises InvalidTokenizer with the part at fault."""
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:
        if not _is_of_tokenizers(error):
            raise
        part = next(
            (name for name in _PARTS if _is_readable({**read_object(path, MOST_TOKENIZER_BYTES), name: None})), ""
        )
        raise InvalidTokenizer(f"{path.name}: {part or 'model or added_tokens'} cannot be read: {error}") from error


def _is_readable(parts: Mapping[str, Any]) -> bool:
    try:
        tokenizers.Tokenizer.from_str(json.dumps(parts))
    except BaseException as error:
        if not _is_of_tokenizers(error):
            raise
        return False
    return True


def _is_of_tokenizers(error: BaseException) -> bool:
    """Return whether it may be an error of `tokenizers`, which panics with files of some faults."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _set_prefix_space(pre_tokenizer: Any, settings: _Settings) -> None:
    """Let the settings say whether a text gets a space at its start, for classes that have it from there."""
    given = settings.get("add_prefix_space")
    declared = str(settings.get("tokenizer_class")).removesuffix("Fast").removesuffix("Tokenizer")
    if not isinstance(given, bool) or declared not in _PREFIXING:
        return
    several = isinstance(pre_tokenizer, tokenizers.pre_tokenizers.Sequence)
    for part in cast("Iterable[Any]", pre_tokenizer) if several else (pre_tokenizer,):
        if isinstance(part, tokenizers.pre_tokenizers.ByteLevel):
            part.add_prefix_space = given


def _add(
    backend: tokenizers.Tokenizer,
    declared: Sequence[tokenizers.AddedToken],
    roles: Sequence[tokenizers.AddedToken],
    extra: Sequence[tokenizers.AddedToken],
) -> None:
    """Add tokens in the order of transformers: declared ones by id, those with a role, extra ones."""
    added = _added_names(backend).union(token.content for token in declared)
    names = {token.content for token in roles}
    tokens = [*declared, *(token for token in (*roles, *extra) if token.content not in added)]
    for token in tokens:
        token.special = token.special or token.content in names
    backend.add_tokens(tokens)


def _added_names(backend: tokenizers.Tokenizer) -> frozenset[str]:
    return frozenset(token.content for token in backend.get_added_tokens_decoder().values())


def _roles(settings: _Settings) -> list[tokenizers.AddedToken]:
    """Return the tokens with a role; settings of other types whose names end alike are none."""
    values = [(name, value) for name, value in named_values(settings) if isinstance(value, str) or _has_content(value)]
    return [token for name, value in values if (token := _token(value, name))]


def _has_content(value: Any) -> bool:
    return isinstance(value, dict) and "content" in value


def _declared(settings: _Settings) -> dict[int, tokenizers.AddedToken]:
    """Return the tokens of `added_tokens_decoder` in the order of their ids."""
    field = "added_tokens_decoder"
    entries = settings.get(field, {})
    if not isinstance(entries, dict) or len(entries) > _MAX_TOKENS:
        raise InvalidTokenizer(f"{_FILE}: {field} must be an object with at most {_MAX_TOKENS:,} members")
    tokens = {_id(key): _token(value, f"{field}.{key}") for key, value in entries.items()}
    return {at: token for at, token in sorted(tokens.items()) if token}


def _id(key: str) -> int:
    if not key.isascii() or not key.isdecimal() or len(key) > 9:
        raise InvalidTokenizer(f"{_FILE}: added_tokens_decoder has the key {key[:100]!r}, which is no token id")
    return int(key)


def _extra(settings: _Settings) -> Iterator[tokenizers.AddedToken]:
    """Yield the extra special tokens without a role."""
    field = "extra_special_tokens"
    values = settings.get(field) or []
    if not isinstance(values, list) or len(values) > _MAX_TOKENS:
        raise InvalidTokenizer(f"{_FILE}: {field} must be a list of at most {_MAX_TOKENS:,} tokens, or an object")
    for at, value in enumerate(values):
        if token := _token(value, f"{field}[{at}]"):
            yield token


def _legacy_tokens(folder: Path, settings: _Settings) -> Iterator[tokenizers.AddedToken]:
    """Yield the tokens of `added_tokens.json`, which counts where `added_tokens_decoder` is missing."""
    path = folder / "added_tokens.json"
    if "added_tokens_decoder" in settings or not path.is_file():
        return
    entries = read_object(path)
    # Transformers does not recognize tokens here that `tokenizer_config.json` describes by their fields.
    values = [*(value for _, value in named_values(settings)), *(settings.get("extra_special_tokens") or [])]
    special = {value for value in values if isinstance(value, str)}
    special.update(value["content"] for value in values if _has_content(value) and "__type" not in value)
    for content, _ in sorted(entries.items(), key=lambda entry: int(entry[1])):
        yield tokenizers.AddedToken(content, normalized=content not in special, special=content in special)


def _token(value: Any, field: str) -> tokenizers.AddedToken | None:
    """Return the token that a setting describes by its text or its fields; None for null, false and empty text."""
    if not value or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return tokenizers.AddedToken(_checked(value, field), special=True)
    if not isinstance(value, dict) or not isinstance(content := value.get("content"), str):
        raise InvalidTokenizer(f"{_FILE}: {field} must be a text, or an object with the text as content")
    flags = {name: value[name] for name in _FLAGS if name in value}
    if wrong := [name for name, flag in flags.items() if not isinstance(flag, bool)]:
        raise InvalidTokenizer(f"{_FILE}: {field}.{wrong[0]} must be true or false")
    return tokenizers.AddedToken(_checked(content, field), **flags)


def _checked(content: str, field: str) -> str:
    if len(content) > _MAX_CHARACTERS:
        raise InvalidTokenizer(f"{_FILE}: {field} must have at most {_MAX_CHARACTERS:,} characters")
    return content


def _check_id(backend: tokenizers.Tokenizer, declared: int, content: str) -> None:
    """Raise InvalidTokenizer if a token that `tokenizer.json` lacks cannot have its declared id."""
    if (given := backend.token_to_id(content)) == declared:
        return
    holder = backend.id_to_token(declared)
    reason = f"the id of {holder!r}" if holder else f"but the next free id is {given}"
    raise InvalidTokenizer(f"{_FILE}: added_tokens_decoder gives {content!r} the id {declared}, {reason}")


def _check_rows(backend: tokenizers.Tokenizer, folder: Path, own_size: int, contents: set[str]) -> None:
    """Raise InvalidTokenizer if a token that only the settings name lies beyond the model's embeddings."""
    rows = _embedding_rows(folder)
    for content in sorted(contents):
        at = backend.token_to_id(content)
        if rows is not None and at is not None and at >= max(rows, own_size):
            raise InvalidTokenizer(f"{_FILE}: {content!r} has the id {at}, beyond the model's {rows:,} embeddings")


def _embedding_rows(folder: Path) -> int | None:
    path = folder / "config.json"
    config = read_object(path) if path.is_file() else {}
    inner = config.get("text_config")
    rows = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return rows if isinstance(rows, int) else None
