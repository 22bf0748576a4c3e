"""The dialects that an operator selects by name, instead of what the chat template shows."""

from dataclasses import dataclass, replace

from services.gateway.dialects.declarations import CALL_FORMATS, HARMONY, THOUGHT_FORMATS
from services.gateway.dialects.dialect import CallFormat, Dialect, ThoughtFormat
from services.runtime.settings import InvalidSetting

AUTO, NONE = "auto", "none"
_HARMONY_CALLS, _HARMONY_THOUGHT = HARMONY.calls, HARMONY.thought
assert _HARMONY_CALLS is not None, "declared"
assert _HARMONY_THOUGHT is not None, "declared"


def _by_name(formats: tuple[CallFormat | ThoughtFormat, ...]) -> dict[str, CallFormat | ThoughtFormat]:
    return {name: one for one in reversed(formats) for name in (*one.aliases, one.name)}


_CALLS = _by_name((*CALL_FORMATS, _HARMONY_CALLS))
_THOUGHTS = _by_name((*THOUGHT_FORMATS, _HARMONY_THOUGHT))

CALL_PARSERS = (AUTO, NONE, *sorted(_CALLS))
"""The names of call formats, with vLLM's names of its tool call parsers."""
REASONING_PARSERS = (AUTO, NONE, *sorted(_THOUGHTS))
"""The names of thought formats, with vLLM's names of its reasoning parsers."""


def check_call_parser(option: str, name: str) -> None:
    """Raise InvalidSetting, naming the option, unless it is the name of a call format."""
    _check(option, name, CALL_PARSERS)


def check_reasoning_parser(option: str, name: str) -> None:
    """Raise InvalidSetting, naming the option, unless it is the name of a thought format."""
    _check(option, name, REASONING_PARSERS)


def _check(option: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise InvalidSetting(f"{option} must be one of {', '.join(known)}, not {name!r}")


@dataclass(frozen=True)
class DialectSelection:
    """The names of two formats. `auto` means the chat template's own; `none` means that there is none."""

    calls: str = AUTO
    thought: str = AUTO

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the template's dialect is used."""
        return AUTO not in (self.calls, self.thought)

    def applied_to(self, found: Dialect) -> Dialect:
        """Return the template's dialect with the selected formats in it."""
        if self.calls == AUTO and self.thought == AUTO:
            return found
        calls = found.calls if self.calls == AUTO else _CALLS.get(self.calls)
        thought = found.thought if self.thought == AUTO else _THOUGHTS.get(self.thought)
        made = replace(found, calls=calls, thought=thought)  # type: ignore[arg-type]
        is_harmony = calls is _HARMONY_CALLS or thought is _HARMONY_THOUGHT
        return HARMONY if is_harmony else replace(made, channels=None)


UNSELECTED = DialectSelection()
