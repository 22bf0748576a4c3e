"""Settings of a service: one frozen dataclass, whose fields say their default, meaning and bounds once.

The command line and the environment are read by what this module knows of the fields; see `services.cli.options`.
"""

import dataclasses
import math
from typing import Any


class InvalidSetting(ValueError):
    """A setting is out of range. The message names it."""


def setting(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    may_be_empty: bool = False,
) -> Any:
    """Declare a field: its default, one sentence for people, and the values it may have.

    A text whose default is empty may always be empty.
    """
    bounds = {"meaning": meaning, "least": least, "most": most, "choices": choices, "may_be_empty": may_be_empty}
    return dataclasses.field(default=default, metadata=bounds)


def check(settings: Any) -> None:
    """Raise InvalidSetting for the first field out of its bounds."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        least, most, choices = (field.metadata[name] for name in ("least", "most", "choices"))
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidSetting(f"{field.name} is {value}, it must be finite")
        if least is not None and value < least:
            raise InvalidSetting(f"{field.name} is {value}, it must be at least {least}")
        if most is not None and value > most:
            raise InvalidSetting(f"{field.name} is {value}, it must be at most {most}")
        if choices and value not in choices:
            raise InvalidSetting(f"{field.name} is {value!r}, it must be one of {', '.join(choices)}")
        if value == "" and field.default and not field.metadata["may_be_empty"]:
            raise InvalidSetting(f"{field.name} is empty")
