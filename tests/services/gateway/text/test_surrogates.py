"""Unpaired surrogates, which JSON can escape and UTF-8 cannot encode, in texts of JSON within texts."""

import pytest

from quire.v1 import gateway_pb2
from services.gateway.text.conversation import _arguments, _tool
from services.runtime.errors import InvalidField


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\udfff": 1}'])
def test_arguments_of_an_earlier_call_with_a_surrogate_stay_as_written(text: str) -> None:
    assert _arguments(text) == text


def test_the_schema_of_a_tool_with_a_surrogate_is_refused_by_name() -> None:
    with pytest.raises(InvalidField, match=r"tools\[0\].parameters has an unpaired surrogate"):
        _tool(gateway_pb2.Tool(name="f", parameters='{"type": "object", "title": "\\ud800"}'), "tools[0]")
