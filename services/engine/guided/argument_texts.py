"""Grammars of arguments that are written one by one, between texts of their own, instead of as one JSON object."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from services.engine.guided.plain_strings import PlainStrings
from services.engine.guided.schemas.schema_nodes import (
    ANNOTATIONS,
    SchemaNode,
    UnsupportedSchema,
    listing,
    mapping,
    pointer_part,
)
from services.engine.guided.schemas.string_texts import strings_of, without_strings
from services.wire.requests.argument_texts import ArgumentTexts

# What a tool's schema may have beside its properties.
_BESIDE = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", *ANNOTATIONS}
)


class Argument(NamedTuple):
    """An argument of a tool. `text` is the expression of its strings, empty if it has none; see `string_texts`.

    `value` is the schema of its other values, False if it has none; without a text before strings, of all values.
    """

    key: str
    text: str
    value: Any
    required: bool


def arguments_of(schema: SchemaNode, texts: ArgumentTexts, has_fault: Callable[[str], bool]) -> list[Argument]:
    """Return the arguments of a tool in the order of its schema. Raises UnsupportedSchema.

    `has_fault` compiles a grammar in Lark, and returns whether it fails or matches nothing.
    """
    if extra := next((keyword for keyword in schema if keyword not in _BESIDE), ""):
        raise UnsupportedSchema(f"#/{pointer_part(extra)}: {extra} is not supported between tags")
    properties, required = mapping(schema, "properties"), listing(schema, "required")
    if missing := next((key for key in required if properties.get(key, False) is False), ""):
        raise UnsupportedSchema(f"#/required: {pointer_part(missing)} is not in properties")
    found = []
    for key, part in properties.items():
        path = f"#/properties/{pointer_part(key)}"
        argument = _argument(schema, part, texts, path, has_fault)._replace(key=key, required=key in required)
        if argument.text or argument.value is not False:
            found.append(argument)
        elif argument.required:
            raise UnsupportedSchema(f"{path}: no value of it can be written between tags")
    return found


def _argument(
    root: SchemaNode, schema: Any, texts: ArgumentTexts, path: str, has_fault: Callable[[str], bool]
) -> Argument:
    """Return an argument without its key. Combined keywords may leave nothing of a part: then it has no such values."""
    sets = strings_of(root, schema, path) if texts.before_text else []
    if not sets:
        return Argument("", "", schema, required=False)
    value = without_strings(root, schema)
    if value is not False and has_fault(f"start: %json {json.dumps(_whole(root, value))}"):
        value = False
    unlike_values = value is not False and texts.are_alike
    strings = PlainStrings(texts.mark, lambda one: has_fault(f"start: ONE\nONE: {one}"), unlike_values=unlike_values)
    return Argument("", strings.of(sets), value, required=False)


class GrammarTexts(Protocol):
    """Writes texts for a grammar; names of tokens become tokens."""

    def of(self, text: str) -> str:
        """Return a text as a sequence of literals and tokens; empty for an empty one."""

    def literal(self, text: str) -> str:
        """Return a text without tokens."""

    def split(self, text: str) -> tuple[str, str]:
        """Return the literal text in front of the first token, and the sequence of the rest."""


class ArgumentRules:
    """The rules of the arguments of one tool. `prefix` is part of their names."""

    def __init__(self, texts: ArgumentTexts, write: GrammarTexts, options: Mapping[str, Any], prefix: str) -> None:
        self._texts = texts
        self._write = write
        self._options = options
        self._prefix = prefix

    def of(self, schema: SchemaNode, arguments: list[Argument]) -> list[str]:
        """Return the rules of the arguments of a schema, the first of which is `arguments_` with the prefix."""
        rules = [rule for at, argument in enumerate(arguments) for rule in self._argument(schema, argument, at)]
        return [*self._order([argument.required for argument in arguments]), *rules]

    def _order(self, required: list[bool]) -> Iterator[str]:
        """Yield the rules that keep the arguments in the order of the schema.

        `some` with a number are those in front of it, of which there is at least one. They stand on the left, as
        llguidance follows long rows best.
        """
        name, separator = self._prefix, self._write.of(self._texts.separator)
        last = len(required)
        nothing = ['""'] if not any(required) else []
        yield f"arguments_{name}: {' | '.join([*([f'some_{name}_{last}'] if required else []), *nothing])}"
        for at, is_required in enumerate(required):
            cases = [f"argument_{name}_{at}"] if not any(required[:at]) else []
            cases += [f"some_{name}_{at} {separator} argument_{name}_{at}"] if at else []
            cases += [f"some_{name}_{at}"] if at and not is_required else []
            yield f"some_{name}_{at + 1}: {' | '.join(cases)}"

    def _argument(self, root: SchemaNode, argument: Argument, at: int) -> Iterator[str]:
        texts, name, value = self._texts, f"{self._prefix}_{at}", argument.value
        begin = " ".join(filter(None, [self._write.of(texts.before_key), self._write.literal(argument.key)]))
        cases = []
        if argument.text:
            cases.append(f"{begin} {self._write.of(texts.before_text)} text_{name}")
        if value is not False:
            cases.append(
                f"{begin} {self._write.of(texts.before_value)} value_{name} {self._write.of(texts.after_value)}"
            )
        yield f"argument_{name}: {' | '.join(cases)}"
        if argument.text:
            yield from self._text_rules(name, argument.text)
        if value is not False:
            yield f"value_{name}: %json {json.dumps(_whole(root, value) | {'x-guidance': self._options})}"

    def _text_rules(self, name: str, expression: str) -> Iterator[str]:
        """Yield the rules of a string and the text behind it: with a literal mark, its first occurrence is the end."""
        before, rest = self._write.split(self._texts.after_text)
        ends = f" {self._write.literal(before)}" if before else ""
        yield f"STRING_{name}: {expression}"
        yield f"TEXT_{name}: STRING_{name}{ends}"
        if rest:
            yield f"text_{name}: TEXT_{name} {rest}"
        else:
            yield f"text_{name}[lazy]: TEXT_{name}"


def _whole(root: SchemaNode, schema: Any) -> SchemaNode:
    """Return a part of a schema as one of its own, with what its references lead to."""
    part = {} if schema is True else schema
    if not _has_reference(part):
        return dict(part)
    rebased: SchemaNode = _rebased(part)
    return {"$defs": {"tool": _rebased(root)}} | rebased


def _has_reference(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_has_reference, schema))
    return isinstance(schema, dict) and ("$ref" in schema or any(map(_has_reference, schema.values())))


def _rebased(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_rebased(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    rebased = {key: _rebased(value) for key, value in schema.items()}
    if isinstance(target := rebased.get("$ref"), str) and target.startswith("#"):
        rebased["$ref"] = f"#/$defs/tool{target[1:]}"
    return rebased
