"""Which tools can have their arguments written one by one, so that a grammar holds a model to its own form."""

import keyword
import re
from collections.abc import Mapping
from typing import Any

from services.wire.requests.argument_texts import ArgumentTexts

# What a schema may have beside its properties; the engine refuses others.
_BESIDE = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "nullable"}
    | {"title", "description", "default", "examples", "example", "$comment", "deprecated"}
)
_NAMES_OF_PARTS = ("patternProperties", "$id", "$anchor")
_KEY = re.compile(r"[\w.$@/-]+")


def can_be_guided(texts: ArgumentTexts | None, schema: Mapping[str, Any]) -> bool:
    """Return whether a grammar can write arguments of this schema. Without texts they are an object in JSON: it can."""
    if texts is None or not schema:
        return True
    properties, required = schema.get("properties"), schema.get("required", [])
    if not (isinstance(properties, dict) and isinstance(required, list) and schema.keys() <= _BESIDE):
        return False
    can_be_named = all(map(_can_be_named if texts.before_text else _is_python_name, properties))
    return can_be_named and set(map(str, required)) <= properties.keys() and not _has_names(schema)


def _can_be_named(key: str) -> bool:
    return bool(_KEY.fullmatch(key))


def _is_python_name(key: str) -> bool:
    return key.isidentifier() and not keyword.iskeyword(key)


def _has_names(schema: Any) -> bool:
    """Return whether a schema names its parts otherwise than by their place, or keys by patterns."""
    if isinstance(schema, list):
        return any(map(_has_names, schema))
    if not isinstance(schema, dict):
        return False
    return any(name in schema for name in _NAMES_OF_PARTS) or any(map(_has_names, schema.values()))
