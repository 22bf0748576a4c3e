"""Explains llguidance's faults in the words of clients' schemas and patterns."""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from services.engine.guided.schemas.schema_nodes import (
    Case,
    SchemaNode,
    case_of,
    children,
    pointer_part,
    reference_names,
    target_of,
)

# Of the processor time that the sandbox grants; afterwards the place is only that of the part found so far.
_SECONDS = 0.5
_MAX_LENGTH = 300
_SHARED = ("$schema", "$id", "$defs", "definitions")
_IN_A_PATTERN = re.compile(
    r'\Aat \d+\(\d+\): invalid regex "(?:[^"\\]|\\.)*" \(in regex\): (.*?)(?:\n\s*\d+ \| .*)?\Z', re.DOTALL
)
_SENTENCES = (
    (r"lookarounds not supported yet; Start\b", "^ is supported only at the start of a pattern"),
    (r"lookarounds not supported yet; End\b", "$ is supported only at the end of a pattern"),
    (r"lookarounds not supported yet; Word", r"word boundaries, such as \b, are not supported"),
    (
        r"oneOf constraints are not supported",
        "its cases may overlap; use anyOf, or cases that differ in type or in a required constant",
    ),
    (r"Expected f64 for (.*)", r"Expected a number for \1"),
    (r"Unknown format: (.*)", r'the format "\1" is not supported'),
    (r"Resource '(.*?)' is not present in a registry", r'"\1" is not in the schema'),
)


# A schema with these may be right. Others are mistakes, such as an unclosed group of a pattern.
_UNSUPPORTED = re.compile("support|may overlap|disjoint|[Uu]nsatisfiable|too large")


def is_unsupported(fault: str) -> bool:
    """Return True if a case with the fault may be left out, False if its author should correct it."""
    return bool(_UNSUPPORTED.search(fault))


def sentence(message: str) -> str:
    """Return llguidance's message in one line, without the places of the grammar that it compiles."""
    if in_a_pattern := _IN_A_PATTERN.match(message):
        message = in_a_pattern[1]
    _, of_a_pattern, what = message.partition("\nerror: ")  # the rest repeats the pattern several times
    line = " ".join((what.partition("\n")[0] if of_a_pattern else message.replace("<non-verbose/>", "")).split())
    for pattern, words in _SENTENCES:
        if found := re.match(pattern, line):
            line = found.expand(words.replace("\\b", "\\\\b"))
            break
    return line if len(line) <= _MAX_LENGTH else line[:_MAX_LENGTH] + "..."


class Place(NamedTuple):
    """Where a fault of a schema is: its JSON pointer, the schema that has it, and the cases around that."""

    path: str
    node: SchemaNode
    cases: list[Case]


def locate(root: SchemaNode, fault: str, fault_of: Callable[[SchemaNode], str]) -> Place:
    """Return the place of the smallest part of a schema that has the same fault alone.

    `fault_of` returns the fault of a schema, empty if there is none.
    """
    shared = {keyword: root[keyword] for keyword in _SHARED if keyword in root}
    deadline = time.monotonic() + _SECONDS
    node, path, seen, cases = root, "#", set[int](), list[Case]()

    def has_fault(part: object) -> bool:
        if time.monotonic() > deadline:
            return False
        return fault_of({**shared, **part}) == fault if isinstance(part, dict) else _is_no_schema(part, fault)

    while id(node) not in seen:
        seen.add(id(node))
        found = next(((part, where) for part, where in _parts(root, node, path) if has_fault(part)), None)
        if found is None:
            break
        part, where = found
        if not isinstance(part, dict):
            return Place(where, node, cases)
        if case := case_of(node, path, where):
            cases.append(case)
        node, path = part, where
    return Place(path + _keyword(node, has_fault), node, cases)


def _parts(root: SchemaNode, node: SchemaNode, path: str) -> Iterator[tuple[object, str]]:
    yield from children(node, path)
    if reference_names(node.get("$ref")):
        yield target_of(root, node["$ref"]), node["$ref"]


def _is_no_schema(part: object, fault: str) -> bool:
    return fault.startswith("schema must be") and part is not None and not isinstance(part, dict | list | bool)


def _keyword(node: dict[str, Any], has_fault: Callable[[object], bool]) -> str:
    """Return the place of the keyword that has the fault alone, relative to its schema; empty if there is none."""
    for keyword, value in node.items():
        if keyword in _SHARED or not has_fault({keyword: value}):
            continue
        if keyword == "patternProperties" and isinstance(value, dict):
            at_fault = (name for name in value if has_fault({keyword: {name: True}}))
            return f"/{keyword}" + next((f"/{pointer_part(name)}" for name in at_fault), "")
        return f"/{keyword}"
    return ""
