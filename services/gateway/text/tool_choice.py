"""Grammars and JSON schemas that force the output to be a tool call."""

import json
from collections.abc import Iterable, Sequence, Set
from typing import Any

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.dialects.dialect import CallFormat
from services.runtime.errors import InvalidField
from services.runtime.http.validation import shown
from services.wire.field_rules import declared_fields
from services.wire.requests.argument_texts import argument_texts_message

_MAX_BYTES = int(declared_fields(decoding_pb2.OutputConstraint.DESCRIPTOR)["tool_calls"].rules.max_bytes)
_MAX_CALLS = int(declared_fields(decoding_pb2.ToolCallGrammar.DESCRIPTOR)["max_calls"].rules.max)
# Keywords beside which an object may get its properties from another schema.
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")
_VALUES = ("const", "enum", "default", "examples", "example")
_NAME = "\ue000"  # stands for any
_ANY_OBJECT = '{"type": "object"}'
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def check_arguments_schema(schema: Any, field: str) -> None:
    """Raise InvalidField if a tool's schema is not that of an object. Without a type it is."""
    kind = schema.get("type", "object") if isinstance(schema, dict) else schema
    if kind not in ("object", ["object"]):
        raise InvalidField(f"{field} must be a JSON schema of type 'object', not {shown(kind)}", field)


def check_names(names: Iterable[str], tools: str) -> None:
    """Raise InvalidField if two tools, in the field `tools`, have one name."""
    first: dict[str, int] = {}
    for at, name in enumerate(names):
        if (before := first.setdefault(name, at)) != at:
            field = f"{tools}[{at}].name"
            raise InvalidField(f"{field} is that of {tools}[{before}], too: {shown(name)}", field)


def arguments_schema(tool: gateway_pb2.Tool) -> str:
    """Return the JSON schema that arguments of a tool are written by, as text.

    Objects with properties get no others, unless the schema allows them by `additionalProperties`: small models would
    invent them. All such arguments are valid under the tool's schema, and are objects if that leaves it open.
    """
    if not tool.parameters:
        return json.dumps(_NO_ARGUMENTS)
    schema = {"type": "object", **json.loads(tool.parameters)}
    schema.pop("nullable", None)
    return json.dumps(schema if _combines(schema) else _closed(schema), ensure_ascii=False)


def _combines(schema: Any) -> bool:
    """Return True if an object may get properties from several schemas."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, dict):
        return False
    several = isinstance(all_of := schema.get("allOf"), list) and len(all_of) > 1
    beside = "properties" in schema and any(keyword in schema for keyword in _COMBINING)
    return several or beside or any(map(_combines, schema.values()))


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value if key in _VALUES else _closed(value) for key, value in schema.items()}
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    return {"additionalProperties": False} | closed if is_object else closed


def call_grammar(
    tools: Sequence[gateway_pb2.Tool], calls: CallFormat, *, parallel: bool
) -> decoding_pb2.ToolCallGrammar:
    """Return the grammar of a call of one of these tools, or with `parallel` of several, as the model writes them.

    The tools' arguments must be such that they `can_be_guided`.
    """
    grammar = decoding_pb2.ToolCallGrammar(
        max_calls=_MAX_CALLS if parallel and not calls.single else 1, separator=calls.separator
    )
    begin, end = calls.opening + calls.inner[0], calls.inner[1] + calls.closing
    if in_one := calls.repeats and not calls.alone:
        grammar.section_begin, grammar.section_end = begin, end
    for tool in tools:
        one = calls.form.around(tool.name)
        grammar.after_number = one.after_number
        added = grammar.tools.add(name=tool.name, parameters=arguments_schema(tool))
        added.begin, added.end = (one.begin, one.end) if in_one else (begin + one.begin, one.end + end)
    if texts := calls.form.argument_texts:
        grammar.argument_texts.CopyFrom(argument_texts_message(texts))
    return grammar


def in_text(
    grammar: decoding_pb2.ToolCallGrammar, calls: CallFormat, free: Set[str]
) -> decoding_pb2.ToolCallGrammar | None:
    """Let text stand around the calls of a grammar; None if no mark begins them, or the grammar would be too large.

    The arguments of tools in `free` are any object, if they are JSON.
    """
    before_name = calls.opening or (calls.inner[0] + calls.form.around(_NAME).begin).partition(_NAME)[0]
    grammar.mark, grammar.mark_only_at_start = before_name, not calls.opening
    for tool in grammar.tools:
        if tool.name in free and not calls.form.argument_texts:
            tool.parameters = _ANY_OBJECT
    return grammar if grammar.ByteSize() <= _MAX_BYTES else None


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
