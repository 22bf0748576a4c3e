"""The quantization that a folder's files declare. It imports no torch: a start is refused early."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

CONFIGURATION = "config.json"
FIELDS = ("quantization_config", "compression_config")
# Files beside a configuration that declares nothing: of ModelOpt, of AutoGPTQ before 2024, of AWQ's authors.
DECLARATIONS = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
_LARGEST = 16 << 20  # bytes


class Declared(NamedTuple):
    """A declaration: its method, in small letters, its fields, and the file that has it."""

    method: str
    fields: Mapping[str, Any]
    file: str


def declared(folder: Path) -> Declared | None:
    """Return what a folder declares, None if its weights are not quantized.

    Raises OSError or ValueError if a file cannot be read.
    """
    configuration = _object(folder / CONFIGURATION)
    if found := declared_by(configuration):
        return found
    for name, method in DECLARATIONS.items():
        if (folder / name).is_file():
            fields = _object(folder / name)
            return Declared(_method(fields, method), fields, name)
    return None


def declared_by(configuration: Mapping[str, Any]) -> Declared | None:
    """Return what a model's configuration declares, or its text part."""
    text = configuration.get("text_config")
    for part in (configuration, text if isinstance(text, dict) else {}):
        for name in FIELDS:
            if fields := part.get(name):
                known = fields if isinstance(fields, dict) else {}
                return Declared(_method(known, ""), known, CONFIGURATION)
    return None


def _method(fields: Mapping[str, Any], default: str) -> str:
    named = fields.get("quant_method")
    if isinstance(named, str) and named:
        return named.lower()
    if any(fields.get(f"load_in_{bits}bit") for bits in (4, 8)):
        return "bitsandbytes"
    return default


def declaring_file(folder: Path) -> str:
    """Return the name of the file that declares a folder's quantization, else that of its configuration."""
    try:
        found = declared(folder)
    except (OSError, ValueError, RecursionError):
        return next((name for name in DECLARATIONS if (folder / name).is_file()), CONFIGURATION)
    return found.file if found else CONFIGURATION


def _object(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"{path.name} has more than {_LARGEST} bytes")
    found = json.loads(path.read_bytes())
    return found if isinstance(found, dict) else {}
