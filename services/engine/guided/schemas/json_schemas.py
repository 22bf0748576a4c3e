"""Prepares clients' JSON schemas for llguidance: checks each keyword, and makes numbers representable.

llguidance ignores unknown keywords, and reads every number as a double: 9007199254740993 would become
9007199254740992. So each keyword must be enforced or an annotation; all others are refused with their path. Each
number must be exact as a double; other bounds move inwards to the next double, other constants are refused.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from fractions import Fraction
from itertools import chain

from services.engine.guided.schemas.finite_schemas import refuse_endless
from services.engine.guided.schemas.rewritten_keywords import bound_format, list_unique_items, name_keys
from services.engine.guided.schemas.schema_nodes import (
    ANNOTATIONS,
    LISTS,
    MAPS,
    SUBSCHEMAS,
    TYPES,
    Case,
    InvalidSchema,
    SchemaNode,
    UnsupportedSchema,
    case_of,
    children,
    mapping,
    pointer_part,
    shown,
    steps,
    target_of,
)
from services.engine.guided.schemas.schema_numbers import (
    LOWER,
    UPPER,
    Unrepresentable,
    exact_multiple,
    include_bounds,
    is_representable,
    lcm_overflows,
    move_bounds,
)

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_APPLICATORS = ("const", "enum", "allOf", "anyOf", "oneOf", "$ref")
_NAMING = ("$id", "id", "$anchor")
_META_SCHEMAS = ("http://json-schema.org/", "https://json-schema.org/")  # llguidance has them
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/2019-09|draft/2020-12)/schema#?")
_IDENTIFIERS = ("$schema", "$id", "id", "$anchor", "$defs", "definitions")

ENFORCED = frozenset(
    {*_IDENTIFIERS, *SUBSCHEMAS, *LISTS, *MAPS, *LOWER, *UPPER, *_COUNTS, "uniqueItems", "propertyNames"}
    | {"$ref", "const", "enum", "type", "required", "pattern", "format", "multipleOf", "nullable"}
)
UNSUPPORTED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains"}
    | {"dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"}
    | {"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary", "x-guidance"}
)
# Keywords that llguidance enforces, but that have no meaning in these drafts.
_UNKNOWN_TO = {"draft-04": ("const", "prefixItems"), "draft-06": ("prefixItems",), "draft-07": ("prefixItems",)}
_MOST_COUNTED, _MOST_REACHED = 2**32, 2**24
_MAX_KEYWORD_LENGTH = 60
# These have escapes of their own; llguidance would write others as `\u0001`, and so any letter of an open key.
_OPERATIONS = ("&&", "--", "~~")
_OF_PATTERN = re.compile(r"\\.|\[\^?\]?|&&|--|~~|.", re.DOTALL)
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")


class SchemaPreparation:
    """Prepares one schema in place; again after a case was left out of it.

    `nodes` are its parts, outer ones first. If it is refused, `cases` are those around the part at fault.
    """

    def __init__(self, root: SchemaNode) -> None:
        self.part = root
        self.nodes: list[tuple[SchemaNode, str]] = []
        self.cases: list[Case] = []
        self._root = root
        self._seen: set[int] = set()
        self._annotations: list[tuple[SchemaNode, str]] = []
        self._passed: set[tuple[int, str]] = set()
        self._multiples: list[Fraction] = []
        self._bounded: list[tuple[SchemaNode, str]] = []
        self._references: list[tuple[object, str]] = []
        self._cases_of_nodes: list[list[Case]] = []
        self._has_names = False
        self._intersects = False

    def run(self) -> None:
        """Prepare the schema. Raises InvalidSchema."""
        self._visit(self._root, "#")
        self._check_references()
        for node, keyword in self._annotations:  # at the end, because references may lead through them
            if (id(node), keyword) not in self._passed:
                node.pop(keyword, None)
        for (node, path), cases in zip(self.nodes, self._cases_of_nodes, strict=True):
            self.part, self.cases = node, cases
            self._rewrite(node, path)
        self.cases = []
        refuse_endless(self._root, self.nodes)
        if self._intersects and lcm_overflows(self._multiples):
            raise InvalidSchema("#: multipleOf: the least common multiple of the schema's values has too many digits")
        include_bounds(self._bounded, together=self._intersects)

    def _visit(self, node: object, path: str) -> None:
        if not isinstance(node, dict) or id(node) in self._seen:
            return  # llguidance finds what is not a schema at all
        self._seen.add(id(node))
        self.nodes.append((node, path))
        self._cases_of_nodes.append(self.cases[:])
        self.part = node
        self._check(node, path)
        for child, where in children(node, path):
            self._visit_part(child, where, case_of(node, path, where))
        self._has_names |= any(isinstance(node.get(keyword), str) for keyword in _NAMING)
        if "$ref" in node:
            self._references.append((node["$ref"], f"{path}/$ref"))
        for place, name, _ in steps(self._root, node.get("$ref")):
            self._passed.add((id(place), name))
        if isinstance(target := target_of(self._root, node.get("$ref")), dict):
            self._visit(target, node["$ref"])

    def _visit_part(self, part: object, path: str, case: Case | None) -> None:
        if case is not None:
            self.cases.append(case)
        self._visit(part, path)
        if case is not None:
            self.cases.pop()  # stays after a fault

    def _check(self, node: SchemaNode, path: str) -> None:
        _check_unicode(node, path)
        for keyword in list(node):
            self._check_keyword(node, keyword, f"{path}/{pointer_part(keyword)}")
        _check_draft(node, path)
        _check_types(node, path)
        _check_values(node, path)
        _check_patterns(node, path)
        _add_null(node, path)
        move_bounds(node, path)
        if any(keyword in node for keyword in (*LOWER, *UPPER)):
            self._bounded.append((node, path))
        _check_counts(node, path)
        self._note_multiple(node, path)
        applied = [keyword for keyword in ("allOf", "anyOf", "oneOf", "$ref") if keyword in node]
        self._intersects |= "allOf" in applied or bool(applied and len(node) > 1) or "patternProperties" in node

    def _rewrite(self, node: SchemaNode, path: str) -> None:
        """Write keywords that llguidance lacks, or misreads, in others."""
        if not isinstance(node.get("items"), list):
            node.pop("additionalItems", None)  # has no meaning; llguidance would ignore prefixItems beside it
        name_keys(self._root, node, path)
        list_unique_items(self._root, node, path)
        bound_format(node)
        _group(node)

    def _check_references(self) -> None:
        """Check that references lead into the schema. llguidance checks those by the names of its parts."""
        for reference, path in self._references:
            if not isinstance(reference, str):
                raise InvalidSchema(f"{path} must be a string, not {shown(reference)}")
            inside = reference in ("", "#") or self._has_names or reference.startswith(_META_SCHEMAS)
            if not inside and target_of(self._root, reference) is None:
                raise InvalidSchema(f"{path} is {shown(reference)}, which is not in the schema")

    def _check_keyword(self, node: SchemaNode, keyword: str, path: str) -> None:
        if _annotates(keyword) or (keyword == "uniqueItems" and node[keyword] is False):
            self._annotations.append((node, keyword))
        elif keyword in UNSUPPORTED:
            raise UnsupportedSchema(f"{path}: {keyword} is not supported")
        elif keyword not in ENFORCED:
            near = get_close_matches(keyword, ENFORCED, 1, 0.75)
            hint = f"; did you mean {near[0]}?" if near else "; custom annotations begin with x-"
            raise InvalidSchema(f"{path}: {keyword[:_MAX_KEYWORD_LENGTH]} is not a JSON schema keyword{hint}")
        for draft, unknown in _UNKNOWN_TO.items():
            if keyword in unknown and draft in str(self._root.get("$schema", "")):
                raise InvalidSchema(f"{path}: {keyword} is not a keyword of {draft}, which $schema declares")

    def _note_multiple(self, node: SchemaNode, path: str) -> None:
        if "multipleOf" not in node:
            return
        try:
            self._multiples.append(exact_multiple(node["multipleOf"]))
        except Unrepresentable as error:
            raise InvalidSchema(f"{path}/multipleOf is {shown(node['multipleOf'])}, {error}") from error


def _annotates(keyword: str) -> bool:
    return keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword not in UNSUPPORTED)


def _check_unicode(node: SchemaNode, path: str) -> None:
    """Check the strings that are not in subschemas: JSON may have a half of a surrogate pair, which is no character."""
    for keyword, value in node.items():
        where = f"{path}/{pointer_part(keyword)}"
        names = [(name, where) for name in (mapping(node, keyword) if keyword in MAPS else ())]
        is_text = not (_annotates(keyword) or keyword in (*SUBSCHEMAS, *LISTS, *MAPS))
        for text, at in chain([(keyword, path)], names, _strings(value, where) if is_text else ()):
            if found := _SURROGATE.search(text):
                raise InvalidSchema(
                    f"{at} has U+{ord(found[0]):04X}, a half of a surrogate pair, which is no character"
                )


def _strings(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield the strings in a value, with their paths, and before them the names in the same object."""
    if isinstance(value, dict):
        yield from ((name, path) for name in value)
        for name, part in value.items():
            yield from _strings(part, f"{path}/{pointer_part(name)}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _strings(part, f"{path}/{number}")
    elif isinstance(value, str):
        yield value, path


def _check_patterns(node: SchemaNode, path: str) -> None:
    """Check that no class of characters has what llguidance takes as an operation, and JSON Schema as characters."""
    keys = node.get("patternProperties")
    patterns = [
        (f"{path}/patternProperties/{pointer_part(key)}", key) for key in (keys if isinstance(keys, dict) else ())
    ]
    for where, pattern in [(f"{path}/pattern", node.get("pattern")), *patterns]:
        if isinstance(pattern, str) and (found := _class_operation(pattern)):
            raise UnsupportedSchema(f"{where}: {found} in a class of characters is supported only with a backslash")


def _class_operation(pattern: str) -> str:
    """Return the first unescaped `[`, `&&`, `--` or `~~` in a class of characters, `]` as its first one; else empty."""
    of_class = False
    for part in _OF_PATTERN.findall(pattern):
        if not of_class:
            of_class = part in ("[", "[^")
            if part in ("[]", "[^]"):
                return "]"
        elif part == "]":
            of_class = False
        elif part[0] == "[" or part in _OPERATIONS:
            return str(part[:1] if part[0] == "[" else part)
    return ""


def _check_draft(node: SchemaNode, path: str) -> None:
    """Check that llguidance has the meta-schema that `$schema` names: nothing is retrieved."""
    draft = node.get("$schema", _DRAFT)
    if not isinstance(draft, str) or not _DRAFTS.fullmatch(draft):
        raise InvalidSchema(f'{path}/$schema must be that of draft 4 or later, such as "{_DRAFT}", not {shown(draft)}')


def _check_types(node: SchemaNode, path: str) -> None:
    types = node.get("type", [])
    for one in types if isinstance(types, list) else [types]:
        if one not in TYPES:
            raise InvalidSchema(f"{path}/type must be one or several of {', '.join(TYPES)}, not {shown(one)}")
    for keyword in ("enum", "allOf", "anyOf", "oneOf"):
        if keyword in node and not isinstance(node[keyword], list):
            raise InvalidSchema(f"{path}/{keyword} must be an array, not {shown(node[keyword])}")
    for keyword in ("type", "enum", "allOf", "anyOf", "oneOf"):
        if node.get(keyword) == []:
            raise InvalidSchema(f"{path}/{keyword} must have at least one entry")
    if not isinstance(node.get("uniqueItems", False), bool):
        raise InvalidSchema(f"{path}/uniqueItems must be true or false, not {shown(node['uniqueItems'])}")


def _check_values(node: SchemaNode, path: str) -> None:
    for keyword in ("const", "enum"):
        for value, where in _leaves(node.get(keyword), f"{path}/{keyword}"):
            if isinstance(value, str):
                _check_characters(value, where)
            elif not is_representable(value):
                raise UnsupportedSchema(
                    f"{where} is {shown(value)}, which has more digits than a double can represent; "
                    "use a string or a regex"
                )


def _check_characters(text: str, path: str) -> None:
    if found := _CONTROL.search(text):
        raise UnsupportedSchema(f"{path} has the control character U+{ord(found[0]):04X}, which is not supported")


def _leaves(value: object, path: str) -> Iterator[tuple[str | int | float, str]]:
    """Yield the numbers and strings in a value, with their paths."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, f"{path}/{pointer_part(name)}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{path}/{number}")
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value, path


def _add_null(node: SchemaNode, path: str) -> None:
    """Replace `nullable` of OpenAPI 3.0 by null in the type next to it."""
    if "nullable" not in node:
        return
    nullable, types = node.pop("nullable"), node.get("type")
    if not isinstance(nullable, bool):
        raise InvalidSchema(f"{path}/nullable must be true or false, not {shown(nullable)}")
    if nullable:
        if not isinstance(types, str | list):
            raise InvalidSchema(f"{path}/nullable needs a type next to it")
        listed = [types] if isinstance(types, str) else types
        node["type"] = listed if "null" in listed else [*listed, "null"]


def _check_counts(node: SchemaNode, path: str) -> None:
    for keyword in _COUNTS:
        if keyword not in node:
            continue
        count = node[keyword]
        if isinstance(count, bool) or not isinstance(count, int | float) or count < 0 or count % 1:
            raise InvalidSchema(f"{path}/{keyword} must be a non-negative integer, not {shown(count)}")
        if count < (_MOST_COUNTED if keyword.startswith("max") else _MOST_REACHED):
            node[keyword] = int(count)
        elif keyword.startswith("max"):
            del node[keyword]  # no output is that long
        else:
            raise InvalidSchema(f"{path}/{keyword} is {shown(count)}, which no output reaches")


def _group(node: SchemaNode) -> None:
    """Put keywords that belong together next to each other: llguidance reads those between two of these apart."""
    applied = [keyword for keyword in node if keyword in _APPLICATORS]
    if not applied or len(applied) == len(node):
        return
    before = list(node)[: list(node).index("properties")] if "properties" in node else []
    first = [keyword for keyword in before if keyword in _APPLICATORS]
    rest = [keyword for keyword in node if keyword not in _APPLICATORS]
    ordered = {keyword: node[keyword] for keyword in (*first, *rest, *applied[len(first) :])}
    node.clear()
    node.update(ordered)
