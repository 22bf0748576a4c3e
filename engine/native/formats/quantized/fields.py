"""Fields of declarations, and which modules they mean. It imports no torch."""

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

import regex

from engine.errors import ModelUnsupported

# Of a comparison with a pattern, which a stranger's file may have made slow; and of all comparisons of a folder.
_MOST_SECONDS, _LEAST_SECONDS, _ALL_SECONDS = 0.05, 0.0001, 20.0
_LONGEST_PATTERN, _LONGEST_SHOWN = 4096, 120  # characters
_MOST_REPEATS = 10_000  # of a part of a pattern, by counts in braces: it takes memory for each
_MOST_COMPILED = 10_000  # patterns, each once: the library keeps 500
_COUNTS = regex.compile(r"\{([^{}]*)\}")


def integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a field that is an integer. Raises ModelUnsupported, with the name, if it is missing or none."""
    found = fields.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int):
        raise ModelUnsupported(f"its quantization has {name} {shown(found)}, which is no integer")
    return found


def flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a field that is true or false; null is the default. Raises ModelUnsupported, with the name, for others."""
    found = fields.get(name)
    if found is None:
        return default
    if not isinstance(found, bool):
        raise ModelUnsupported(f"its quantization has {name} {shown(found)}, which is neither true nor false")
    return found


def seconds_of_each(comparisons: int) -> float:
    """Return the processor seconds allowed for each comparison, so that all of them end within two minutes."""
    return min(_MOST_SECONDS, max(_LEAST_SECONDS, _ALL_SECONDS / max(1, comparisons)))


def matches(pattern: str, module: str, seconds: float = _MOST_SECONDS, *, anywhere: bool = False) -> bool:
    """Return whether a regular expression matches the start of a module's name, or a part of it if `anywhere`.

    Raises ModelUnsupported if the pattern is none, or takes longer than `seconds` of processor time.
    """
    try:
        compiled = _compiled(pattern)
        compare = compiled.search if anywhere else compiled.match
        return compare(module, timeout=seconds) is not None
    except (regex.error, RecursionError) as error:
        raise ModelUnsupported(f"its quantization has the pattern {shown(pattern)}, which is none: {error}") from error
    except TimeoutError as error:
        raise ModelUnsupported(f"its quantization has the pattern {shown(pattern)}, which takes too long") from error


@lru_cache(maxsize=_MOST_COMPILED)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    if len(pattern) > _LONGEST_PATTERN:
        raise ModelUnsupported(f"its quantization has a pattern of {len(pattern)} characters")
    if _repeats(pattern) > _MOST_REPEATS:
        raise ModelUnsupported(f"its quantization has the pattern {shown(pattern)}, which repeats too often")
    return regex.compile(pattern)


def shown(value: Any) -> str:
    """Return a value of a declaration as messages have it, the middle of a long one left out."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN // 2]}...{text[-_LONGEST_SHOWN // 2 :]}"


def _repeats(pattern: str) -> int:
    """Return at most how often counts in braces, of which each may be within others, repeat a part of a pattern."""
    counts = (regex.findall("[0-9]+", braces) for braces in _COUNTS.findall(pattern))
    return prod(max(map(_count, found), default=1) or 1 for found in counts)


def _count(digits: str) -> int:
    return int(digits) if len(digits) < len(str(_MOST_REPEATS)) else _MOST_REPEATS + 1


def names(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a field that is a list of names, null is none. Raises ModelUnsupported, with the name, for others."""
    found: Any = fields.get(name)
    if found is None:
        return ()
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise ModelUnsupported(f"its quantization has {name} {shown(found)}, which is no list of names")
    return tuple(found)


def check_no_cache(fields: Mapping[str, Any], *declarations: str) -> None:
    """Raise ModelUnsupported, with the name of the field, if K and V are declared as quantized."""
    for name in declarations:
        if fields.get(name):
            raise ModelUnsupported(
                f"its quantization declares {name}, scales for a quantized KV cache, which is not served: remove "
                f"{name}, then K and V are stored unquantized, or quantized by --kv-dtype int8"
            )
