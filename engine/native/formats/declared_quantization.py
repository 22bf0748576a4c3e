"""Quantized weights that a configuration declares, which are refused. It imports no torch: a start is refused early."""

import json
from pathlib import Path
from typing import Any

_QUANTIZATIONS = ("quantization_config", "compression_config")
# Of NVIDIA's ModelOpt, which does not write to the configuration.
_QUANTIZATION_FILE = "hf_quant_config.json"


def quantization(folder: Path) -> str:
    """Return why the quantized weights of a folder are refused, with the method's name; empty for others.

    Raises OSError or ValueError if the configuration cannot be read.
    """
    configuration = json.loads((folder / "config.json").read_text())
    if isinstance(configuration, dict) and (fault := declared_quantization(configuration)):
        return fault
    return _quantized("modelopt") if (folder / _QUANTIZATION_FILE).exists() else ""


def declared_quantization(configuration: dict[str, Any]) -> str:
    """Return why weights are refused that this configuration declares as quantized, empty if it does not."""
    for part in (configuration, configuration.get("text_config") or {}):
        for name in _QUANTIZATIONS:
            if declared := part.get(name):
                return _quantized(_method(declared))
    return ""


def _quantized(method: str) -> str:
    return (
        f"its weights are quantized ({method}), which is not served: use a checkpoint in bfloat16, float16 or float32"
    )


def _method(declared: Any) -> str:
    if not isinstance(declared, dict):
        return "by a method that it does not name"
    bits = next((f"{declared[name]} bits" for name in ("bits", "w_bit", "wbits") if declared.get(name)), "")
    if any(declared.get(f"load_in_{width}bit") for width in (4, 8)):
        bits = "4 bits" if declared.get("load_in_4bit") else "8 bits"
    name = declared.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in declared else "a method without name")
    return f"{name}, {bits}" if bits else str(name)
