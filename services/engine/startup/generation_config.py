"""What a model's folder says about generation: values for what requests leave out, and the tokens that end a text.

Both are taken as vLLM's server takes them: `ModelConfig.get_diff_sampling_param` in its vllm/config/model.py, and
`SamplingParams.update_from_generation_config`, which adds the tokenizer's end token to those of the file.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import ModelUnsupported
from quire.v1 import decoding_pb2
from services.models.files.bounded_json import InvalidModelFile, read_configuration
from services.models.files.tokenizer_loading import InvalidTokenizer, load_tokenizer
from services.models.tokenizer_settings import named_tokens, tokenizer_settings
from services.runtime.settings import InvalidSetting
from services.wire.field_rules import DeclaredField, declared_fields

AUTO, NONE = "auto", "none"
_FILE, _CONFIG, _TOKENIZER = "generation_config.json", "config.json", "tokenizer_config.json"
# Names in the file where they differ from those of the contract.
_KEYS = {"max_tokens": "max_new_tokens"}
_EOS = "eos_token_id"
# transformers' and vLLM's value of top_k for all tokens.
_ALL = -1

log = logging.getLogger("quire.engine")


def generation_defaults(setting: str, model: Path) -> decoding_pb2.GenerationDefaults:
    """Return the defaults of requests: of the model's file (`auto`), of another folder's, or none (`none`).

    `do_sample` is not read: as at vLLM, an answer is greedy by its temperature alone.

    Raises InvalidSetting for a folder without the file, and ModelUnsupported for a value out of bounds, by its name.
    """
    given = {} if setting == NONE else _object(_path(setting, model))
    defaults = decoding_pb2.GenerationDefaults()
    for name, field in declared_fields(defaults.DESCRIPTOR).items():
        key = _KEYS.get(name, name)
        if given.get(key) is not None:
            setattr(defaults, name, _number(given[key], field, key))
    return defaults


def declared_end_tokens(setting: str, model: Path) -> dict[str, tuple[int, ...]]:
    """Return the end tokens of generation_config.json, or of config.json if it names none, by the file's name.

    Raises ModelUnsupported for one that is no token id of the vocabulary.
    """
    config = _object(model / _CONFIG)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    size = config.get("vocab_size", text.get("vocab_size"))
    named = ((_FILE, _object(_path(setting, model))), (_CONFIG, config), (_CONFIG, text))
    for name, given in named:
        if given.get(_EOS) is not None:
            return {name: _token_ids(given[_EOS], size if isinstance(size, int) else None, name)}
    return {}


def end_tokens(setting: str, model: Path, known: frozenset[int], vocabulary_size: int) -> frozenset[int]:
    """Return the tokens that end a text, and log where they are named.

    They are those that transformers' `generate` stops at (`known`), and the end token of the tokenizer: some models
    name the end of a turn only there. Raises ModelUnsupported as `declared_end_tokens` does.
    """
    sources = declared_end_tokens(setting, model)
    named = [one for ids in sources.values() for one in ids]
    ends = frozenset(one for one in (*known, *named) if 0 <= one < vocabulary_size)
    own = _tokenizers_end(model, vocabulary_size)
    texts = [", ".join(map(str, sorted(ends))) + f" ({' and '.join(sources) or 'the type of the model'})"] * bool(ends)
    if own is not None and own not in ends:
        texts.append(f"{own} ({_TOKENIZER})")
    if texts:
        log.info("texts end at the tokens %s", " and ".join(texts))
    else:
        log.warning("no file of the model names an end token: texts end at max_tokens or with the context")
    return ends | {own} if own is not None else ends


def check_generation(setting: str, model: Path) -> None:
    """Read what the files say, before the model is loaded. Raises InvalidSetting and ModelUnsupported."""
    generation_defaults(setting, model)
    declared_end_tokens(setting, model)


def _path(setting: str, model: Path) -> Path:
    """Return the file that the setting chooses; with `none`, it still names end tokens."""
    if setting in (AUTO, NONE):
        return model / _FILE
    path = Path(setting) / _FILE
    if not path.is_file():
        raise InvalidSetting(f"generation_config must be auto, none or a folder with {_FILE}, not {setting!r}")
    return path


def _number(value: Any, field: DeclaredField, key: str) -> float:
    """Return a value of the file for a field. Raises ModelUnsupported."""
    kind = (int, float) if field.is_fraction else (int,)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ModelUnsupported(f"{_FILE}: {key} must be {'a number' if field.is_fraction else 'an integer'}")
    if key == "top_k" and value == _ALL:
        return 0
    bits = 1024 if field.is_fraction else 31
    if isinstance(value, int) and abs(value) >> bits:
        raise ModelUnsupported(f"{_FILE}: {key} must be less than 2^{bits}")
    if fault := field.fault(value):
        raise ModelUnsupported(f"{_FILE}: {key} {fault.rule}")
    return value


def _token_ids(declared: object, vocabulary_size: int | None, file: str) -> tuple[int, ...]:
    ids = declared if isinstance(declared, list) else [declared]
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int):
            raise ModelUnsupported(f"{file}: {_EOS} must be a token id, or a list of them, not {str(declared)[:40]!r}")
        if one < 0 or (vocabulary_size is not None and one >= vocabulary_size):
            bounds = "at least 0" if vocabulary_size is None else f"between 0 and {vocabulary_size - 1}"
            raise ModelUnsupported(f"{file}: {_EOS} must be {bounds}, not {str(one)[:40]}")
    return tuple(ids)


def _tokenizers_end(folder: Path, vocabulary_size: int) -> int | None:
    """Return the id of the tokenizer's end token, None if it names none that the model can generate."""
    text = named_tokens(tokenizer_settings(folder)).get("eos_token")
    if not text:
        return None
    token = _backend(folder).token_to_id(text)
    if token is None or token >= vocabulary_size:
        log.warning("%s: eos_token %r is no token of the model, so it ends no text", _TOKENIZER, text[:40])
        return None
    return token


def _backend(folder: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer with the tokens that only the settings name. Raises ModelUnsupported."""
    try:
        return load_tokenizer(folder).backend
    except InvalidTokenizer as error:
        raise ModelUnsupported(str(error)) from error


def _object(path: Path) -> Mapping[str, Any]:
    """Read a configuration; empty if there is none. Raises ModelUnsupported."""
    if not path.is_file():
        return {}
    try:
        return read_configuration(path)
    except InvalidModelFile as error:
        raise ModelUnsupported(str(error)) from error
