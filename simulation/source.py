"""A scenario as Python source, so that one that failed can be kept as a test."""

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

from simulation.scenario import Scenario

_INDENT = "    "
_WIDTH = 100


def source_of(scenario: Scenario) -> str:
    """Return an expression that makes a scenario, without what is the default."""
    return _source(scenario, "")


def _source(value: Any, indent: str) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if is_dataclass(value) or hasattr(value, "_fields"):
        parts = [f"{name}={_source(one, indent + _INDENT)}" for name, one in _given(value)]
        return _call(type(value).__name__, parts, indent)
    if isinstance(value, tuple) and value and not isinstance(value[0], int):
        return _call("", [_source(one, indent + _INDENT) for one in value], indent)
    return repr(value)


def _call(name: str, parts: list[str], indent: str) -> str:
    line = f"{name}({', '.join(parts)}{',' if not name and len(parts) == 1 else ''})"
    if len(indent) + len(line) <= _WIDTH and "\n" not in line:
        return line
    return f"{name}(\n" + "".join(f"{indent}{_INDENT}{part},\n" for part in parts) + f"{indent})"


def _given(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields that are not the default."""
    if is_dataclass(value):
        for field in fields(value):
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            if (one := getattr(value, field.name)) != default:
                yield field.name, one
    else:
        for name in value._fields:
            if name not in value._field_defaults or value._field_defaults[name] != getattr(value, name):
                yield name, getattr(value, name)
