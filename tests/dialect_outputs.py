"""Random outputs of models, written in any dialect, with what they consist of."""

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

from services.gateway.dialects.declarations import CALL_FORMATS, HARMONY, THOUGHT_FORMATS
from services.gateway.dialects.dialect import CallFormat, Dialect
from services.gateway.dialects.events import Arguments, CallStart, Event, Reasoning, Text, merged
from services.gateway.dialects.forms.call_form import WrittenCall
from services.gateway.dialects.forms.parameter_calls import ParameterCalls
from services.gateway.dialects.forms.quoted_calls import QuotedCalls
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.parser import DialectParser

DIALECTS = [
    *(Dialect(THOUGHT_FORMATS[at % len(THOUGHT_FORMATS)], calls) for at, calls in enumerate(CALL_FORMATS)),
    HARMONY,
]
PROPERTIES: dict[str, Any] = {
    "word": {"type": "string"},
    "note": {"type": ["string", "null"]},
    "count": {"type": "integer"},
    "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "deep": {"type": "boolean"},
    "options": {"type": "object"},
    "pages": {"type": "array", "items": {"type": "string"}},
}
SCHEMA = {"type": "object", "properties": PROPERTIES}
TOOLS = OfferedTools({"look_up": SCHEMA, "look_up_word": SCHEMA, "now": {}})
# Texts that marks are made of, or that end strings in some form.
_PIECES = (
    *(
        "a",
        "é",
        "🙂",
        "漢字",
        " ",
        "\n",
        "\t",
        '"',
        "'",
        "\\",
        "\\n",
        "<",
        ">",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        ":",
        "|",
    ),
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "</parameter>",
        "<parameter=word>",
        "</arg_value>",
    ),
    *(
        "<|im_end|>",
        "<|channel|>",
        "functools",
        "```",
        "null",
        "true",
        "3",
        "</function>",
        "<|tool_call_end|>",
        "<escape>",
    ),
)


class Output(NamedTuple):
    """A text, and the thought, the answer and the calls in it."""

    text: str
    thought: str
    answer: str
    calls: list[tuple[str, dict[str, Any]]]


def random_text(draw: Random, most: int = 6) -> str:
    """Return a text with marks in it."""
    return "".join(draw.choice(_PIECES) for _ in range(draw.randint(0, most)))


def random_arguments(draw: Random) -> dict[str, Any]:
    """Return arguments of TOOLS."""
    values: dict[str, Any] = {
        "word": random_text(draw),
        "note": draw.choice([None, "n" + random_text(draw, 2)]),
        "count": draw.randint(-3, 10**12),
        "share": draw.choice([None, 0.5, -2e30, 7]),
        "deep": draw.random() < 0.5,
        "options": {"a": [1, None, {"b": random_text(draw, 2)}], "é": True},
        "pages": [random_text(draw, 3) for _ in range(draw.randint(0, 2))],
    }
    return {key: values[key] for key in draw.sample(sorted(values), draw.randint(0, len(values)))}


def random_output(draw: Random, dialect: Dialect, most_calls: int = 3) -> Output:
    """Return an output of the dialect. Words are plain where a mark would be one in the dialect, too."""
    form = dialect.calls
    assert form is not None
    calls = [_random_call(draw, form) for _ in range(draw.choice([0, *range(1, most_calls + 1)]))]
    thought = "I think: 1 < 2." if dialect.thought and draw.random() < 0.6 else ""
    answer = "Let me see,\nthen." if not calls or (form.opening and draw.random() < 0.6) else ""
    writes = _on_channels if dialect.channels else _between_marks
    return Output(writes(dialect, thought, answer, calls), thought, answer, calls)


def _random_call(draw: Random, form: CallFormat) -> tuple[str, dict[str, Any]]:
    name = draw.choice(["look_up", "look_up_word", "now"])
    arguments = {} if name == "now" else random_arguments(draw)
    return name, _writable(arguments, form)


def _writable(arguments: dict[str, Any], form: CallFormat) -> dict[str, Any]:
    """Leave out values that have what ends a value in this form: no escape could hold it."""
    end = None
    if isinstance(form.form, ParameterCalls):
        following = "|".join(map(re.escape, (form.form.key[0], form.form.end or form.closing)))
        end = re.compile(rf"{re.escape(form.form.value[1])}\s*({following}|$)")
    elif isinstance(form.form, QuotedCalls):
        end = re.compile(re.escape(form.form.quote))
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return {key: value for key, value in arguments.items() if end is None or not end.search(texts[key])}


def _written(calls: list[tuple[str, dict[str, Any]]], form: CallFormat) -> str:
    written = [
        form.form.written(WrittenCall(name, json.dumps(arguments, ensure_ascii=False))) for name, arguments in calls
    ]
    return form.section(written) if calls else ""


def _between_marks(dialect: Dialect, thought: str, answer: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    assert dialect.calls is not None
    parts = [answer, _written(calls, dialect.calls)]
    before = f"{dialect.thought.start}\n{thought}\n{dialect.thought.end}\n\n" if thought and dialect.thought else ""
    return before + "\n".join(filter(None, parts))


def _on_channels(dialect: Dialect, thought: str, answer: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    assert dialect.calls is not None
    messages = [f"<|channel|>analysis<|message|>{thought}<|end|>"] if thought else []
    messages += [f"<|channel|>final<|message|>{answer}<|end|>"] if answer else []
    return "<|start|>assistant".join([*messages, *(_written([call], dialect.calls) for call in calls)])


def garbage(draw: Random, dialect: Dialect) -> str:
    """Return pieces of an output of the dialect in any order, as broken models write them."""
    form, thought = dialect.calls, dialect.thought
    assert form is not None
    whole = form.section(
        [form.form.written(WrittenCall("look_up", '{"word": "a", "count": 3, "options": {"a": [1]}}'))]
    )
    parts = re.findall(r"<[^<>]*>|\[[A-Z_]+\]|[\w.]+|\s+|.", whole)
    pieces = [*parts, *parts, *_PIECES, whole, *((thought.start, thought.end) if thought else ())]
    return form.opening * draw.randint(0, 1) + "".join(draw.choice(pieces) for _ in range(draw.randint(1, 25)))


def parsed(dialect: Dialect, pieces: Iterator[str] | list[str], **options: Any) -> list[Event]:
    """Return the events of an output in pieces, merged."""
    parser = DialectParser(dialect, TOOLS, **options)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged(events + parser.finish())


def read(events: list[Event]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the thought, the answer and the calls of an output."""
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    answer = "".join(event.text for event in events if isinstance(event, Text))
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [json.loads(event.text) for event in events if isinstance(event, Arguments)]
    return thought, answer, list(zip(names, arguments, strict=True))


def cut(draw: Random, text: str) -> list[str]:
    """Cut a text into pieces."""
    places = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(0, 12)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
