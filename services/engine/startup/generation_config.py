"""The values that a model's folder has for what requests leave out, as vLLM's server takes them.

Source: `ModelConfig.get_diff_sampling_param` in vLLM's vllm/config/model.py.
"""

from pathlib import Path
from typing import Any

from engine.errors import ModelUnsupported
from quire.v1 import decoding_pb2
from services.engine.startup.end_tokens import NONE, declared_end_tokens, file_name, read_generation_config
from services.wire.field_rules import DeclaredField, declared_fields

# Names in the file where they differ from those of the contract.
_KEYS = {"max_tokens": "max_new_tokens"}
# transformers' and vLLM's value of top_k for all tokens.
_ALL = -1


def generation_defaults(setting: str, model: Path) -> decoding_pb2.GenerationDefaults:
    """Return the defaults of requests: of the model's file (`auto`), of another folder's, or none (`none`).

    `do_sample` has no effect: as at vLLM, an answer is greedy by its temperature alone.

    Raises InvalidSetting for a folder without the file, and ModelUnsupported for a value out of bounds, by its name.
    """
    given = {} if setting == NONE else read_generation_config(setting, model)
    defaults = decoding_pb2.GenerationDefaults()
    for name, field in declared_fields(defaults.DESCRIPTOR).items():
        key = _KEYS.get(name, name)
        if given.get(key) is not None:
            try:
                setattr(defaults, name, _number(given[key], field, key))
            except ModelUnsupported as fault:
                raise ModelUnsupported(f"{file_name(setting)}: {fault}") from None
    return defaults


def check_generation(setting: str, model: Path) -> None:
    """Read what the files say, before the model is loaded. Raises InvalidSetting and ModelUnsupported."""
    generation_defaults(setting, model)
    declared_end_tokens(setting, model)


def _number(value: Any, field: DeclaredField, key: str) -> float:
    """Return a value of the file for a field. Raises ModelUnsupported."""
    kind = (int, float) if field.is_fraction else (int,)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ModelUnsupported(f"{key} must be {'a number' if field.is_fraction else 'an integer'}")
    if key == "top_k" and value == _ALL:
        return 0
    bits = 1024 if field.is_fraction else 31
    if isinstance(value, int) and abs(value) >> bits:
        raise ModelUnsupported(f"{key} must be less than 2^{bits}")
    if fault := field.fault(value):
        raise ModelUnsupported(f"{key} {fault.rule}")
    return value
