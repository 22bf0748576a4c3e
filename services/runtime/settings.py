"""Settings of a service: a frozen dataclass whose fields have a default, a description and bounds.

`services.cli.options` makes command-line options and environment variables of the fields.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any


class InvalidSetting(ValueError):
    """The value of a setting is invalid. The message names the setting."""


def setting(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    may_be_empty: bool = False,
    form: Callable[[str, str], None] | None = None,
) -> Any:
    """Declare a field: its default, its description in one sentence, and its permitted values.

    A text whose default is empty may always be empty. `form` checks a text: it receives the name and the value, and
    raises InvalidSetting.
    """
    bounds = {"least": least, "most": most, "choices": choices, "may_be_empty": may_be_empty, "form": form}
    return dataclasses.field(default=default, metadata=bounds | {"meaning": meaning})


def check(settings: Any) -> None:
    """Raise InvalidSetting for the first field out of its bounds."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        least, most, choices = (field.metadata[name] for name in ("least", "most", "choices"))
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidSetting(f"{field.name} must be finite, not {value}")
        if least is not None and value < least:
            raise InvalidSetting(f"{field.name} must be at least {least}, not {value}")
        if most is not None and value > most:
            raise InvalidSetting(f"{field.name} must be at most {most}, not {value}")
        if choices and value not in choices:
            raise InvalidSetting(f"{field.name} must be one of {', '.join(choices)}, not {value!r}")
        if value == "" and field.default and not field.metadata["may_be_empty"]:
            raise InvalidSetting(f"{field.name} must not be empty")
        if value and field.metadata["form"]:
            field.metadata["form"](field.name, value)
