"""The tokens at which a model's texts end, as its files name them.

They are those of `SamplingParams.update_from_generation_config` of vLLM, which adds the tokenizer's end token to those
of the file. Nothing here needs the wire contract: models also run where its packages are too old for it.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import ModelUnsupported
from services.models.files.bounded_json import InvalidModelFile, read_configuration
from services.models.files.folder_check import has_tokenizer
from services.models.files.tokenizer_loading import InvalidTokenizer, load_tokenizer
from services.models.tokenizer_settings import named_tokens, tokenizer_settings
from services.runtime.settings import InvalidSetting

AUTO, NONE = "auto", "none"
GENERATION = "generation_config.json"
_CONFIG, _TOKENIZER = "config.json", "tokenizer_config.json"
_EOS = "eos_token_id"

log = logging.getLogger("quire.engine")


def declared_end_tokens(setting: str, model: Path) -> dict[str, tuple[int, ...]]:
    """Return the end tokens of generation_config.json, or of config.json if it names none, by the file's name.

    With another folder as the setting, those of its file are added. Raises ModelUnsupported for one that is no token
    id of the vocabulary.
    """
    config = _configuration(model / _CONFIG, _CONFIG)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    size = config.get("vocab_size", text.get("vocab_size"))
    own = ((GENERATION, read_generation_config(AUTO, model)), (_CONFIG, config), (_CONFIG, text))
    named = [(name, given[_EOS]) for name, given in own if given.get(_EOS) not in (None, [])][:1]
    if setting not in (AUTO, NONE):
        further = read_generation_config(setting, model).get(_EOS)
        named += [(file_name(setting), further)] * (further is not None)
    return {name: _token_ids(ids, size if isinstance(size, int) else None, name) for name, ids in named}


def end_tokens(setting: str, model: Path, known: frozenset[int], vocabulary_size: int) -> frozenset[int]:
    """Return the tokens that end a text, and log where they are named.

    They are those that transformers' `generate` stops at (`known`), and the end token of the tokenizer: some models
    name the end of a turn only there. Raises ModelUnsupported as `declared_end_tokens` does.
    """
    sources = declared_end_tokens(setting, model)
    named = [one for ids in sources.values() for one in ids]
    ends = frozenset(one for one in (*known, *named) if 0 <= one < vocabulary_size)
    own, text = None, named_tokens(tokenizer_settings(model)).get("eos_token")
    if (ends or text) and has_tokenizer(model):
        backend = _backend(model)
        own = _tokenizers_end(backend, text, vocabulary_size) if text else None
        _warn_of_text(backend, ends)
    texts = [", ".join(map(str, sorted(ends))) + f" ({' and '.join(sources) or 'the type of the model'})"] * bool(ends)
    if own is not None and own not in ends:
        texts.append(f"{own} ({_TOKENIZER})")
    if texts:
        log.info("texts end at the tokens %s", " and ".join(texts))
    else:
        log.warning("no file of the model names an end token: texts end at max_tokens or with the context")
    return ends | {own} if own is not None else ends


def file_name(setting: str) -> str:
    """Return the name of the file that the setting chooses, for messages: with its folder if it is another."""
    return GENERATION if setting in (AUTO, NONE) else str(Path(setting) / GENERATION)


def _generation_path(setting: str, model: Path) -> Path:
    """Return the file that the setting chooses: with `none` the model's, which still names end tokens."""
    if setting in (AUTO, NONE):
        return model / GENERATION
    path = Path(setting) / GENERATION
    if not path.is_file():
        raise InvalidSetting(f"generation_config must be auto, none or a folder with {GENERATION}, not {setting!r}")
    return path


def read_generation_config(setting: str, model: Path) -> Mapping[str, Any]:
    """Read the generation_config.json that the setting chooses. Raises ModelUnsupported and InvalidSetting."""
    return _configuration(_generation_path(setting, model), file_name(setting))


def _configuration(path: Path, name: str) -> Mapping[str, Any]:
    """Read a configuration, named so in faults; empty if there is none. Raises ModelUnsupported."""
    if not path.is_file():
        return {}
    try:
        return read_configuration(path)
    except InvalidModelFile as error:
        raise ModelUnsupported(str(error).replace(path.name, name, 1)) from error


def _token_ids(declared: object, vocabulary_size: int | None, file: str) -> tuple[int, ...]:
    ids = declared if isinstance(declared, list) else [declared]
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int):
            raise ModelUnsupported(f"{file}: {_EOS} must be a token id, or a list of them, not {str(declared)[:40]!r}")
        if one < 0 or (vocabulary_size is not None and one >= vocabulary_size):
            bounds = "at least 0" if vocabulary_size is None else f"between 0 and {vocabulary_size - 1}"
            raise ModelUnsupported(f"{file}: {_EOS} must be {bounds}, not {str(one)[:40]}")
    return tuple(ids)


def _tokenizers_end(backend: tokenizers.Tokenizer, text: str, vocabulary_size: int) -> int | None:
    """Return the id of the tokenizer's end token, None if the model cannot generate it."""
    token = backend.token_to_id(text)
    if token is None or token >= vocabulary_size:
        log.warning("%s: eos_token %r is no token of the model, so it ends no text", _TOKENIZER, text[:40])
        return None
    return token


def _warn_of_text(backend: tokenizers.Tokenizer, ends: frozenset[int]) -> None:
    """Log a warning of end tokens that are ordinary text."""
    added = backend.get_added_tokens_decoder()
    if text := sorted(token for token in ends if token not in added and backend.id_to_token(token) is not None):
        shown = ", ".join(f"{token} ({backend.id_to_token(token)!r})" for token in text)
        log.warning("the end tokens %s are also text: answers end at it, and guided answers that need it fail", shown)


def _backend(folder: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer with the tokens that only the settings name. Raises ModelUnsupported."""
    try:
        return load_tokenizer(folder).backend
    except InvalidTokenizer as error:
        raise ModelUnsupported(str(error)) from error
