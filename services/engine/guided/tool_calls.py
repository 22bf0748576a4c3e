"""The grammar of tool calls, written for llguidance.

Each tool has its own schema, so references of one schema cannot lead into another.
"""

import json
from collections.abc import Callable

from quire.v1 import decoding_pb2

_MAX_CALLS = 16
_START, _END = "<tool_call>\n", "}\n</tool_call>"


class InvalidTool(ValueError):
    """A tool is refused; the message names it."""


def source_of(calls: decoding_pb2.ToolCallGrammar) -> str:
    """Return a text that determines the grammar, for `tool_call_grammar`."""
    tools = [[tool.name, tool.parameters] for tool in calls.tools]
    return json.dumps([calls.max_calls if calls.HasField("max_calls") else 1, tools])


def tool_call_grammar(source: str, prepare_schema: Callable[[str], str], whitespace: str) -> str:
    """Return the grammar in Lark's syntax. Raises InvalidTool; `prepare_schema` may raise ValueError."""
    most, tools = json.loads(source)
    if not tools or not 1 <= most <= _MAX_CALLS:
        raise InvalidTool(f"it must have at least one tool, and max_calls between 1 and {_MAX_CALLS}, not {most}")
    options = {"x-guidance": {"lenient": False, "whitespace_pattern": whitespace}}
    more = f' ("\\n" call){{0,{most - 1}}}' if most > 1 else ""
    lines = [f"start: call{more}", "call: " + " | ".join(f"call_{at}" for at in range(len(tools)))]
    for at, (name, parameters) in enumerate(tools):
        try:
            schema = json.loads(prepare_schema(parameters)) | options
        except ValueError as error:
            raise InvalidTool(f"tools[{at}].parameters: {error}") from error
        opening = _literal(f'{_START}{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
        lines += [
            f"call_{at}: {opening} arguments_{at} {_literal(_END)}",
            f"arguments_{at}: %json {json.dumps(schema)}",
        ]
    return "\n".join(lines)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
