"""A choice between texts, as a regular expression."""

import re
from collections.abc import Sequence

from services.runtime.errors import InvalidField

_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


def choice_pattern(texts: Sequence[str], field: str) -> str:
    """Return an expression that matches these texts alone. Raises InvalidField, naming `field`."""
    if not all(texts) or not texts:
        raise InvalidField(f"{field} must have at least one text, and no empty text", field)
    return "|".join(_SYNTAX.sub(r"\\\g<0>", text) for text in texts)
