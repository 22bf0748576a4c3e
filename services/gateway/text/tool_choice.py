"""Grammars and JSON schemas that force the output to be a tool call."""

import json
from collections.abc import Sequence
from typing import Any

from quire.v1 import decoding_pb2, gateway_pb2

_MAX_CALLS = 16
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def arguments_schema(tool: gateway_pb2.Tool) -> str:
    """Return the JSON schema of a tool's arguments, as text."""
    return tool.parameters or json.dumps(_NO_ARGUMENTS)


def call_grammar(tools: Sequence[gateway_pb2.Tool], *, parallel: bool) -> decoding_pb2.ToolCallGrammar:
    """Return the grammar of a call of one of these tools, or with `parallel` of several calls, between tags."""
    callable_tools = [decoding_pb2.CallableTool(name=tool.name, parameters=arguments_schema(tool)) for tool in tools]
    return decoding_pb2.ToolCallGrammar(tools=callable_tools, max_calls=_MAX_CALLS if parallel else 1)


def calls_schema(tools: Sequence[gateway_pb2.Tool], *, parallel: bool) -> str:
    """Return the JSON schema of a call of one of these tools, or with `parallel` of a list of calls, as text.

    References inside a tool's schema are rebased to its place in the new schema.
    """
    definitions = {str(at): _rebase(json.loads(arguments_schema(tool)), at) for at, tool in enumerate(tools)}
    calls = [_call(tool.name, at) for at, tool in enumerate(tools)]
    call = {"anyOf": calls} if len(calls) > 1 else calls[0]
    schema = {"type": "array", "minItems": 1, "maxItems": _MAX_CALLS, "items": call} if parallel else call
    return json.dumps({"$defs": definitions} | schema)


def _call(name: str, at: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{at}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _rebase(schema: Any, at: int) -> Any:
    if isinstance(schema, list):
        return [_rebase(one, at) for one in schema]
    if not isinstance(schema, dict):
        return schema
    rebased = {key: _rebase(value, at) for key, value in schema.items()}
    target = rebased.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        rebased["$ref"] = f"#/$defs/{at}{target[1:]}"
    return rebased
