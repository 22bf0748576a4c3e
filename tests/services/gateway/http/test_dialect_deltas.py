"""Encoded deltas are those that are objects, for outputs of all dialects that are cut anywhere."""

import json
from random import Random
from typing import Any

import pytest

from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.parser import DialectParser
from services.gateway.http.openai.dialect_deltas import DialectDeltas
from tests.dialect_outputs import DIALECTS, TOOLS, cut, random_output

OUTPUTS = 40


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
