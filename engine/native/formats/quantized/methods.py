"""The methods of quantization that are served, and why others are refused. It imports no torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.declared import Declared, declared
from engine.native.formats.quantized.scheme import Scheme

HELP = "use a GGUF file, or a checkpoint in bfloat16 with --weights int4 or int8"
# A method's module makes a scheme of the fields; it raises ModelUnsupported, naming the field, for what is not served.
METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {}


def scheme_of(folder: Path) -> Scheme | None:
    """Return the scheme of a folder's weights, None if they are not quantized.

    Raises ModelUnsupported if its method is not served, and OSError or ValueError if a file cannot be read.
    """
    found = declared(folder)
    return scheme_by(found) if found else None


def scheme_by(found: Declared) -> Scheme:
    """Return the scheme of a declaration. Raises ModelUnsupported if it is not served."""
    if not found.method:
        raise ModelUnsupported(f"its weights are quantized by a method that {found.file} does not name: {HELP}")
    if found.method not in METHODS:
        raise ModelUnsupported(f"its weights are quantized ({found.method}), which is not served: {HELP}")
    return METHODS[found.method](found.fields)
