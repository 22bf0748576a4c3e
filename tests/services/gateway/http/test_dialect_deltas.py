"""Deltas of one message: what a client joins. Encoded ones are those that are objects, wherever outputs are cut."""

import json
from random import Random
from typing import Any

import pytest

from services.gateway.dialects.declarations import DEFAULT_CALLS, THOUGHT_FORMATS
from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.parser import DialectParser
from services.gateway.http.openai.dialect_deltas import DialectDeltas, message_of
from tests.dialect_outputs import DIALECTS, TOOLS, cut, random_output

OUTPUTS = 40
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        (f"One.\n{CALL}\nTwo.{CALL}{CALL} Three.", "One.\nTwo.\nThree.", ""),
        (f"{CALL}\n One.", "One.", ""),
        (f"<think>A.</think>{CALL}<think>B.</think>One.", "One.", "A.\nB."),
        (f"One.{CALL}<think>A.</think>Two.", "One.\nTwo.", "A."),
    ],
)
def test_text_and_thoughts_on_both_sides_of_calls_have_a_line_end_between_them(
    text: str, content: str, reasoning: str, size: int
) -> None:
    parser = DialectParser(Dialect(THOUGHT_FORMATS[0], DEFAULT_CALLS), OfferedTools({"now": {}}))
    deltas = DialectDeltas(parser)
    found = [delta for at in range(0, len(text), size) for delta in deltas.push(text[at : at + size])]
    message = message_of(found + deltas.finish())
    assert (message["content"], message.get("reasoning", "")) == (content, reasoning)


def without_ids(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                call["id"] = ""
    return deltas


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.calls.name)
@pytest.mark.parametrize("kept", [{}, {"parallel": False, "reasoning": False}])
def test_encoded_deltas_are_equal(dialect: Dialect, kept: dict[str, bool]) -> None:
    draw = Random(7)
    for _ in range(OUTPUTS):
        pieces = cut(draw, random_output(draw, dialect).text)
        objects, encoded = (DialectDeltas(DialectParser(dialect, TOOLS), **kept) for _ in range(2))
        steps = [(objects.push(piece), encoded.encode(piece, ())) for piece in pieces]
        for given, parts in [*steps, (objects.finish(), encoded.encode_rest())]:
            found = [json.loads(part + b"}") for part in parts]
            assert without_ids(found) == without_ids(given)
        assert encoded.called == objects.called
        assert encoded.parser.failures == objects.parser.failures
