"""What a parser finds in an output, and in what two parsers differ."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bench.dialects.texts import SCHEMAS, DialectText
from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.parser import DialectParser
from services.gateway.http.openai.dialect_deltas import DialectDeltas, message_of

ASPECTS = ("thought", "content", "calls", "arguments")
"""What two readings may differ in: `calls` are their names, and `arguments` those of calls with the same names."""
ERROR = "error"
"""The only aspect of a text at which the peer's parser fails."""


class OutputReading(NamedTuple):
    """The thought and the answer without whitespace at their ends, and the calls.

    Arguments are JSON values; those that are no JSON are the text, in a list of one item. `error` is that of a parser
    which fails: then there is nothing else.
    """

    thought: str
    content: str
    calls: tuple[tuple[str, Any], ...]
    error: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the called tools."""
        return [name for name, _ in self.calls]

    @property
    def arguments(self) -> list[Any]:
        """The arguments of each call."""
        return [arguments for _, arguments in self.calls]


def read_by_quire(sample: DialectText) -> OutputReading:
    """Return what a message of Quire has."""
    found = sample.profile.dialect
    dialect = found if sample.thinks else Dialect(None, found.calls, found.channels)
    parser = DialectParser(dialect, OfferedTools(SCHEMAS), in_thought=sample.opened)
    deltas = DialectDeltas(parser)
    message = message_of(deltas.push(sample.text) + deltas.finish())
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return _reading(message.get("reasoning"), message["content"], [(call["name"], call["arguments"]) for call in calls])


def read_by_peer(given: Mapping[str, Any]) -> OutputReading:
    """Return the reading that a peer sends."""
    found = _reading(given["thought"], given["content"], given["calls"])
    return found._replace(error=given.get("error", ""))


def _reading(thought: str | None, content: str | None, calls: Iterable[tuple[str, str]]) -> OutputReading:
    values = tuple((name, _value(arguments)) for name, arguments in calls)
    return OutputReading((thought or "").strip(), (content or "").strip(), values)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return [text]


def same_value(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal. 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def differing(ours: OutputReading, theirs: OutputReading) -> list[str]:
    """Return the aspects in which two readings differ."""
    if theirs.error:
        return [ERROR]
    same_names = ours.names == theirs.names
    equal = {
        "thought": ours.thought == theirs.thought,
        "content": ours.content == theirs.content,
        "calls": same_names,
        "arguments": not same_names or same_value(ours.arguments, theirs.arguments),
    }
    return [aspect for aspect in ASPECTS if not equal[aspect]]
