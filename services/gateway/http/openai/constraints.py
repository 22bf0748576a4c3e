"""Translates the fields for structured outputs to one constraint."""

import json
from collections.abc import Iterator

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.http.json_types import Schema
from services.gateway.http.openai import requests
from services.gateway.http.openai.field_names import ConstraintTools
from services.runtime.errors import InvalidField
from services.wire.field_rules import check_alone
from services.wire.requests.choices import choice_pattern

_KINDS = ("json_schema", "regex", "json_object")


def constraint_of(body: requests.GenerationRequest, names: dict[str, str]) -> decoding_pb2.OutputConstraint | None:
    """Return the constraint of the output, if any, and add the HTTP names of its fields to `names`.

    Raises InvalidField for more than one constraint.
    """
    constraints = [*_response_format(body), *_guided(body), *_structured(body)]
    if len(constraints) > 1:
        (first, _), (second, _), *_ = constraints
        raise InvalidField(f"{second} cannot be combined with {first}", second)
    if not constraints:
        return None
    name, constraint = constraints[0]
    names |= {f"constraint.{kind}": name for kind in _KINDS} | {"constraint": name}
    return constraint


def _check_strict(
    request: gateway_pb2.GenerateRequest, body: requests.ChatCompletionRequest, names: dict[str, str]
) -> ConstraintTools | None:
    """Check a request whose calls, if any, may have to follow schemas. Raises InvalidField."""
    offered = [] if body.tool_choice == "none" else body.tools or []
    strict = [at for at, tool in enumerate(offered) if tool.function.strict]
    has_format = names.get("constraint", "").startswith("response_format")
    if not offered or not (strict or has_format) or (request.HasField("constraint") and not has_format):
        return None
    names |= {"constraint.tool_calls": "tools"}
    if strict and not has_format:
        check_alone(request, "constraint", f"tools[{strict[0]}].function.strict", InvalidField)
        names |= {"constraint": "tools"}
    return ConstraintTools([(at, tool.function.name) for at, tool in enumerate(offered)])


def _response_format(body: requests.GenerationRequest) -> Iterator[tuple[str, decoding_pb2.OutputConstraint]]:
    if body.response_format is None:
        return
    match body.response_format.type:
        case "json_object":
            yield "response_format", decoding_pb2.OutputConstraint(json_object=True)
        case "json_schema":
            given = body.response_format.json_schema
            if given is None:
                raise InvalidField("response_format.json_schema is missing", "response_format.json_schema")
            any_object = decoding_pb2.OutputConstraint(json_object=True)
            constraint = any_object if given.schema_ is None else _schema(given.schema_)
            yield "response_format.json_schema.schema", constraint


def _guided(body: requests.GenerationRequest) -> Iterator[tuple[str, decoding_pb2.OutputConstraint]]:
    if body.guided_json is not None:
        yield "guided_json", _schema(body.guided_json)
    if body.guided_regex is not None:
        yield "guided_regex", decoding_pb2.OutputConstraint(regex=body.guided_regex)
    if body.guided_choice is not None:
        yield "guided_choice", _choice(body.guided_choice, "guided_choice")


def _structured(body: requests.GenerationRequest) -> Iterator[tuple[str, decoding_pb2.OutputConstraint]]:
    given, path = body.structured_outputs, "structured_outputs"
    if given is None:
        return
    if given.json_ is not None:
        yield f"{path}.json", _schema(given.json_)
    if given.regex is not None:
        yield f"{path}.regex", decoding_pb2.OutputConstraint(regex=given.regex)
    if given.choice is not None:
        yield f"{path}.choice", _choice(given.choice, f"{path}.choice")
    if given.json_object:
        yield f"{path}.json_object", decoding_pb2.OutputConstraint(json_object=True)


def _schema(schema: Schema | str | bool) -> decoding_pb2.OutputConstraint:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return decoding_pb2.OutputConstraint(json_schema=text)


def _choice(texts: list[str], name: str) -> decoding_pb2.OutputConstraint:
    return decoding_pb2.OutputConstraint(regex=choice_pattern(texts, name))


def check_tool_choice(
    request: gateway_pb2.GenerateRequest, body: requests.ChatCompletionRequest, names: dict[str, str]
) -> ConstraintTools | None:
    """Check a `tool_choice` that requires a call, and return the tools that can be called. Raises InvalidField."""
    choice, tools = body.tool_choice, request.prompt.chat.tools
    callable_tools = [(at, tool.name) for at, tool in enumerate(tools)]
    if isinstance(choice, requests.NamedTool):
        name = choice.function.name
        callable_tools = [one for one in callable_tools if one[1] == name]
        fault = "" if callable_tools else f"names {name!r}, which is not in tools"
    elif choice == "required":
        fault = "" if tools else "is 'required', but tools is empty"
    else:
        return _check_strict(request, body, names)
    if fault:
        raise InvalidField(f"tool_choice {fault}", "tool_choice")
    if names.get("constraint", "").startswith("response_format"):
        request.ClearField("constraint")  # a required call is no answer
    if request.HasField("constraint"):
        raise InvalidField(f"tool_choice cannot be combined with {names['constraint']}", "tool_choice")
    check_alone(request, "constraint", "tool_choice", InvalidField)
    names |= {"constraint": "tools", "constraint.json_schema": "tools", "constraint.tool_calls": "tools"}
    return ConstraintTools(callable_tools)
