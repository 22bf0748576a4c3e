"""A choice between texts, as a regular expression."""

import re
from collections.abc import Sequence

from quire.v1 import decoding_pb2
from services.runtime.errors import InvalidField
from services.wire.field_rules import DeclaredField

_EXPRESSION = DeclaredField(decoding_pb2.OutputConstraint.DESCRIPTOR.fields_by_name["regex"])
_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


def choice_pattern(texts: Sequence[str], field: str) -> str:
    """Return an expression that matches these texts alone. Raises InvalidField, naming `field`."""
    if not all(texts) or not texts:
        raise InvalidField(f"{field} must have at least one text, and no empty text", field)
    pattern = "|".join(_SYNTAX.sub(r"\\\g<0>", text) for text in texts)
    if fault := _EXPRESSION.fault(pattern):
        raise InvalidField(f"{field}, written as one regular expression, {fault.rule}", field)
    return pattern
