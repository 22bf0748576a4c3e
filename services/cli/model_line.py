"""One line about a served model: the types of its numbers, and its devices."""

from collections.abc import Iterable


def model_line(name: str, dtype: str, weights: Iterable[str], kv_dtypes: Iterable[str], devices: Iterable[str]) -> str:
    """Return such as `demo: bfloat16, weights Q4_1 on avx512-bf16`. Formats equal to `dtype` are left out."""
    parts = [dtype]
    for what, found in (("weights", weights), ("KV cache", kv_dtypes)):
        if others := [one for one in found if one not in ("", dtype)]:
            parts.append(f"{what} {' and '.join(others)}")
    return f"{name}: {', '.join(parts)} on {', '.join(devices)}"
