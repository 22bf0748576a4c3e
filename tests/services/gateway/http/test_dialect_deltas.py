"""Deltas of one message: what a client joins."""

import pytest

from services.gateway.dialects.declarations import DEFAULT_CALLS, THOUGHT_FORMATS
from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.parser import DialectParser
from services.gateway.http.openai.dialect_deltas import DialectDeltas, message_of

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
