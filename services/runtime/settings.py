"""Settings of a service: a frozen dataclass whose fields have a default, a description, bounds and requirements.

`services.cli.options` makes command-line options and environment variables of the fields; the chart's schema and checks
are made of them too.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class InvalidSetting(ValueError):
    """The value of a setting is invalid. The message names the setting."""


@dataclass(frozen=True)
class Requires:
    """What a setting that is not at its default requires of another, which its default meets.

    `among` has the values that the other one may have, `without` those that it may not, `most` its maximum. `of` limits
    this to values of the setting itself, `besides` has those that require nothing, and `where` limits it to values of
    further settings. `because` completes the sentence.
    """

    other: str
    among: tuple[Any, ...] = ()
    without: tuple[Any, ...] = ()
    most: float | None = None
    of: tuple[Any, ...] = ()
    besides: tuple[Any, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)
    because: str = ""

    def concerns(self, value: Any, default: Any, values: Mapping[str, Any]) -> bool:
        """Whether a value of the setting has this requirement, beside the values of all settings."""
        own = value in self.of if self.of else value not in (default, *self.besides)
        return own and all(values[name] == wanted for name, wanted in self.where.items())

    def holds(self, other: Any) -> bool:
        """Whether a value of the other setting meets the requirement."""
        return (
            (not self.among or other in self.among)
            and other not in self.without
            and (self.most is None or other <= self.most)
        )

    def permitted(self) -> str:
        """Describe the values that the other setting may have."""
        if self.most is not None:
            return f"be at most {self.most:g}"
        values = self.among or self.without
        names = [str(value).lower() if isinstance(value, bool) else str(value) or "empty" for value in values]
        listed = ", ".join(names[:-1]) + " or " * (len(names) > 1) + names[-1]
        return f"be {listed}" if self.among else f"not be {listed}"


class UnmetRequirement(NamedTuple):
    """A requirement that settings do not meet: the setting that has it, and its value."""

    name: str
    value: Any
    requirement: Requires

    def sentence(self, values: Mapping[str, Any], label: Callable[[str], str] = str) -> str:
        """Say what is wrong. `label` names a setting for the reader."""
        requirement = self.requirement
        where = "".join(f" and {label(name)} {value}" for name, value in requirement.where.items())
        beside = f"with {label(self.name)} {self.value}{where}"
        given = f", not {values[requirement.other]}" * (not requirement.without)
        because = f": {requirement.because}" * bool(requirement.because)
        return f"{label(requirement.other)} must {requirement.permitted()} {beside}{given}{because}"


def unmet_requirements(settings_type: Any, values: Mapping[str, Any]) -> Iterator[UnmetRequirement]:
    """Yield the requirements that values of all settings do not meet, in the order of the fields."""
    for one in dataclasses.fields(settings_type):
        for requirement in one.metadata["requires"]:
            value = values[one.name]
            concerned = requirement.concerns(value, one.default, values)
            if concerned and not requirement.holds(values[requirement.other]):
                yield UnmetRequirement(one.name, value, requirement)


def setting(
    default: Any,
    meaning: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    may_be_empty: bool = False,
    form: Callable[[str, str], None] | None = None,
    requires: tuple[Requires, ...] = (),
) -> Any:
    """Declare a field: its default, its description in one sentence, its permitted values, and what it requires.

    A text whose default is empty may always be empty. `form` checks a text: it receives the name and the value, and
    raises InvalidSetting.
    """
    bounds = {"least": least, "most": most, "choices": choices, "may_be_empty": may_be_empty, "form": form}
    return field(default=default, metadata=bounds | {"meaning": meaning, "requires": requires})


def check(settings: Any) -> None:
    """Raise InvalidSetting for the first field out of its bounds, then for the first requirement that is not met."""
    for one in dataclasses.fields(settings):
        value = getattr(settings, one.name)
        least, most, choices = (one.metadata[name] for name in ("least", "most", "choices"))
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidSetting(f"{one.name} must be finite, not {value}")
        if least is not None and value < least:
            raise InvalidSetting(f"{one.name} must be at least {least}, not {value}")
        if most is not None and value > most:
            raise InvalidSetting(f"{one.name} must be at most {most}, not {value}")
        if choices and value not in choices:
            raise InvalidSetting(f"{one.name} must be one of {', '.join(choices)}, not {value!r}")
        if value == "" and one.default and not one.metadata["may_be_empty"]:
            raise InvalidSetting(f"{one.name} must not be empty")
        if value and one.metadata["form"]:
            one.metadata["form"](one.name, value)
    for unmet in unmet_requirements(settings, vars(settings)):
        raise InvalidSetting(unmet.sentence(vars(settings)))
