"""The grammar of tool calls, written for llguidance.

Each tool has its own schema, so references of one schema cannot lead into another.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.v1 import decoding_pb2

_MAX_CALLS = 16
_START, _END = "<tool_call>", "</tool_call>"
_HEADER_LINES, _LINES_OF_TOOL = 2, 2
_FAULT_OF_SCHEMA = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: ")
_LINE_OF_GRAMMAR = re.compile(r"\n\s*\d+ \| ")


class InvalidTool(ValueError):
    """A tool is refused; the message names it."""


def source_of(calls: decoding_pb2.ToolCallGrammar) -> str:
    """Return a text that determines the grammar, for `tools_of`."""
    tools = [[tool.name, tool.parameters] for tool in calls.tools]
    return json.dumps([calls.max_calls if calls.HasField("max_calls") else 1, tools])


class CallableTools(NamedTuple):
    """How many calls there may be, the tools' names, and the texts of their schemas."""

    max_calls: int
    names: list[str]
    schemas: list[str]


def tools_of(source: str) -> CallableTools:
    """Read the text of `source_of`. Raises InvalidTool."""
    most, tools = json.loads(source)
    if not tools or not 1 <= most <= _MAX_CALLS:
        raise InvalidTool(f"it must have at least one tool, and max_calls between 1 and {_MAX_CALLS}, not {most}")
    return CallableTools(most, *([list(part) for part in zip(*tools, strict=True)]))


def tool_call_grammar(
    tools: CallableTools, schemas: list[dict[str, Any]], options: Mapping[str, Any], tags: Mapping[str, int]
) -> str:
    """Return the grammar of tool calls, in Lark syntax.

    `schemas` are those of the tools as llguidance gets them, with `options` for it. `tags` are the names of tokens that
    the model has for tags: a model trained on these does not spell them out.
    """
    more = f' ("\\n" call){{0,{tools.max_calls - 1}}}' if tools.max_calls > 1 else ""
    start, end = (f"<[{tags[tag]}]>" if tag in tags else _literal(tag) for tag in (_START, _END))
    lines = [f"start: call{more}", "call: " + " | ".join(f"call_{at}" for at in range(len(schemas)))]
    for at, (name, schema) in enumerate(zip(tools.names, schemas, strict=True)):
        opening = _literal(f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
        whole = {"type": "object"} | schema | {"x-guidance": options}
        lines += [
            f'call_{at}: {start} {opening} arguments_{at} "}}\\n" {end}',
            f"arguments_{at}: %json {json.dumps(whole)}",
        ]
    return "\n".join(lines)


def split_fault(message: str) -> tuple[int | None, str]:
    """Return the number of the tool whose schema llguidance's message is about, and the message without the grammar."""
    if not (found := _FAULT_OF_SCHEMA.match(message)):
        return None, message
    at = (int(found[1]) - _HEADER_LINES - 1) // _LINES_OF_TOOL
    return at, _LINE_OF_GRAMMAR.split(message[found.end() :])[0]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
