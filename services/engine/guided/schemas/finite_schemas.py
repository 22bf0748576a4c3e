"""Finds schemas that no finite text matches: they require themselves, or their keywords exclude each other.

A grammar with such a part never ends once it is entered. The whole schema is refused; a part that can be avoided, such
as an optional property or one case of several, becomes `false`.

For each schema, the types of its values that a finite text has are the least fixed point of its keywords. Keys and
items that one schema requires are judged with all that combine with it, by references, `allOf` and one case of the
others. What else only a combination excludes is left to llguidance.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from services.engine.guided.schemas.schema_nodes import (
    LISTS,
    MAPS,
    SUBSCHEMAS,
    TYPES,
    InvalidSchema,
    SchemaNode,
    items_of,
    listing,
    mapping,
    pointer_part,
    target_of,
    type_of,
    types_of,
)

_Part = tuple[object, str]  # a schema, and its path
_Given = tuple[SchemaNode, str]  # the same, for one that is an object
_ALL = frozenset(TYPES) - {"integer"}
_NONE: frozenset[str] = frozenset()


def refuse_endless(root: SchemaNode, nodes: list[tuple[SchemaNode, str]]) -> None:
    """Replace parts without a finite text by False. `nodes` are the schema and its parts, outer ones first.

    Raises InvalidSchema if the schema itself has none.
    """
    _refuse_loops(root, nodes)
    search = _FiniteTypes(root, nodes)
    if not search.of(root):
        raise InvalidSchema(search.fault())
    for node, _ in nodes:
        _exclude(node, lambda part: not search.of(part))


def _refuse_loops(root: SchemaNode, nodes: list[tuple[SchemaNode, str]]) -> None:
    """Refuse a schema that leads back to itself for the same value: no validator comes to an end with it."""
    done = set[int]()
    paths = {id(node): path for node, path in nodes}
    for node, _ in nodes:
        way = [(node, _for_same_value(root, node, paths))]
        while way:
            part, where = next(way[-1][1], (None, ""))
            if part is None:
                done.add(id(way.pop()[0]))
            elif any(part is one for one, _ in way):
                raise InvalidSchema(f"{where}: it leads back to itself for the same value, so no output matches it")
            elif id(part) in paths and id(part) not in done and isinstance(part, dict):
                way.append((part, _for_same_value(root, part, paths)))


def _for_same_value(root: SchemaNode, node: SchemaNode, paths: dict[int, str]) -> Iterator[_Part]:
    path = paths[id(node)]
    yield target_of(root, node.get("$ref")) or True, f"{path}/$ref"
    for keyword in ("allOf", "anyOf", "oneOf"):
        yield from ((part, f"{path}/{keyword}/{at}") for at, part in enumerate(listing(node, keyword)))


class _FiniteTypes:
    def __init__(self, root: SchemaNode, nodes: list[tuple[SchemaNode, str]]) -> None:
        self._root = root
        self._found = {id(node): _NONE for node, _ in nodes}
        changed = True
        while changed:
            changed = False
            for node, _ in reversed(nodes):  # parts before the schemas that need them
                if (types := self._types(node)) != self._found[id(node)]:
                    self._found[id(node)], changed = types, True

    def of(self, schema: object) -> frozenset[str]:
        """Return the types of a schema's values that end; all for what is unknown, or no schema at all."""
        if schema is False:
            return _NONE
        return self._found.get(id(schema), _ALL) if isinstance(schema, dict) else _ALL

    def fault(self) -> str:
        """Return the place and the reason why the root has no finite text."""
        node, path, seen = self._root, "#", set[int]()
        while found := next(((part, where) for part, where in self._needed(node, path) if not self.of(part)), None):
            seen.add(id(node))
            part, where = found
            if not isinstance(part, dict):
                return f"{where}: no output matches it"
            if id(part) in seen:
                return f"{where}: it requires itself without end, so no output matches it"
            path = str(node["$ref"]) if where == f"{path}/$ref" else where
            node = part
        return f"{path}: its keywords exclude each other, so no output matches it"

    def _types(self, node: SchemaNode) -> frozenset[str]:
        types = types_of(node)
        if "const" in node:
            types &= {type_of(node["const"])}
        if "enum" in node:
            types &= {type_of(value) for value in listing(node, "enum")}
        for part, _ in self._conjuncts(node, ""):
            types &= self.of(part)
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                types &= frozenset[str]().union(*map(self.of, listing(node, keyword)))
        return types - {name for name, ends in _RULES.items() if name in types and not self._ends(ends, node)}

    def _ends(self, rule: "_Rule", node: SchemaNode) -> bool:
        """Whether values of a type end, with one case of each `anyOf` or `oneOf`."""
        together = list(self._together(node, ""))
        lists = [listing(one, keyword) for one, _ in together for keyword in ("anyOf", "oneOf")]
        # One with True admits everything. One with False only admits nothing, as its types show.
        cases = [[case for case in some if isinstance(case, dict)] for some in lists if True not in some]
        cases = [some for some in cases if some]
        return rule(self, together) and all(
            any(rule(self, [*together, *self._together(case, "")]) for case in some) for some in cases
        )

    def _together(self, node: SchemaNode, path: str) -> Iterator[_Given]:
        """Yield a schema and those that hold with it, by references and `allOf`; none leads back to itself."""
        yield node, path
        for part, where in self._conjuncts(node, path):
            if isinstance(part, dict):
                yield from self._together(part, str(node["$ref"]) if where == f"{path}/$ref" else where)

    def _conjuncts(self, node: SchemaNode, path: str) -> Iterator[_Part]:
        """Yield the schemas that hold for each value of a schema."""
        if (target := target_of(self._root, node.get("$ref"))) is not None:
            yield target, f"{path}/$ref"
        yield from ((part, f"{path}/allOf/{at}") for at, part in enumerate(listing(node, "allOf")))

    def _needed(self, node: SchemaNode, path: str) -> Iterator[_Part]:
        """Yield the schemas whose texts are part of each text of a schema, or of each of its cases."""
        yield from self._conjuncts(node, path)
        for keyword in ("anyOf", "oneOf"):
            cases = [(part, f"{path}/{keyword}/{at}") for at, part in enumerate(listing(node, keyword))]
            if not any(self.of(part) for part, _ in cases):
                yield from cases
        together = list(self._together(node, path))
        for name in _required_by(together):
            yield from (part for one, where in together for part in schemas_of_key(one, name, where))
        yield from _needed_items(together)

    def _object_ends(self, together: Sequence[_Given]) -> bool:
        required = _required_by(together)
        if not all(
            self.of(part) for name in required for one, _ in together for part, _ in schemas_of_key(one, name, "")
        ):
            return False
        return all(self._has_keys(one, len(required)) for one, _ in together)

    def _has_keys(self, node: SchemaNode, required: int) -> bool:
        """Whether an object can have as many keys as a schema demands; `required` are certain."""
        own, least = len(required_of(node)), node.get("minProperties", 0)
        most = node.get("maxProperties", max(required, least))
        if required > most or least > most:
            return False
        missing = least - max(own, required)
        return missing <= 0 or self._has_open_keys(node) or missing <= len(self._optional(node))

    def _optional(self, node: SchemaNode) -> list[str]:
        named = mapping(node, "properties")
        return [name for name in named if name not in required_of(node) and self.of(named[name])]

    def _has_open_keys(self, node: SchemaNode) -> bool:
        patterns = mapping(node, "patternProperties").values()
        return any(self.of(part) for part in (node.get("additionalProperties", True), *patterns))

    def _array_ends(self, together: Sequence[_Given]) -> bool:
        if _exceeds(together, "minItems", "maxItems"):
            return False
        return all(self.of(part) for part, _ in _needed_items(together))

    def _string_ends(self, together: Sequence[_Given]) -> bool:
        return not _exceeds(together, "minLength", "maxLength")


_Rule = Callable[[_FiniteTypes, Sequence[_Given]], bool]
_RULES: dict[str, _Rule] = {
    "object": _FiniteTypes._object_ends,
    "array": _FiniteTypes._array_ends,
    "string": _FiniteTypes._string_ends,
}


def required_of(node: SchemaNode) -> list[str]:
    """Return the keys that a schema requires, each once."""
    return list(dict.fromkeys(name for name in listing(node, "required") if isinstance(name, str)))


def schemas_of_key(node: SchemaNode, name: str, path: str) -> Iterator[_Part]:
    """Yield the schemas that hold for a key's value."""
    found = False
    if name in (named := mapping(node, "properties")):
        found = True
        yield named[name], f"{path}/properties/{pointer_part(name)}"
    for pattern, part in mapping(node, "patternProperties").items():
        if matches(pattern, name):
            found = True
            yield part, f"{path}/patternProperties/{pointer_part(pattern)}"
    if not found:
        yield node.get("additionalProperties", True), f"{path}/additionalProperties"


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a key; True for one that Python cannot read."""
    try:
        return bool(re.search(pattern, name, re.ASCII))
    except (re.error, OverflowError):
        return True


def _required_by(together: Sequence[_Given]) -> list[str]:
    return list(dict.fromkeys(name for one, _ in together for name in required_of(one)))


def _exceeds(together: Sequence[_Given], lower: str, upper: str) -> bool:
    least = max(one.get(lower, 0) for one, _ in together)
    return bool(least > min(one.get(upper, least) for one, _ in together))


def _needed_items(together: Sequence[_Given]) -> Iterator[_Part]:
    least = max(one.get("minItems", 0) for one, _ in together)
    for node, path in together:
        first, others = items_of(node)
        keyword = "items" if isinstance(node.get("items"), list) else "prefixItems"
        yield from ((part, f"{path}/{keyword}/{at}") for at, part in enumerate(first[:least]))
        if least > len(first):
            yield others, f"{path}/{'additionalItems' if keyword == 'items' else 'items'}"


def _exclude(node: SchemaNode, has_no_text: Callable[[Any], bool]) -> None:
    for keyword in SUBSCHEMAS:
        if isinstance(part := node.get(keyword), dict) and has_no_text(part):
            node[keyword] = False
    for keyword in LISTS:
        parts = listing(node, keyword)
        parts[:] = [False if isinstance(part, dict) and has_no_text(part) else part for part in parts]
    for keyword in MAPS[:2]:  # definitions are used only where they are referred to
        for name, part in mapping(node, keyword).items():
            if isinstance(part, dict) and has_no_text(part):
                node[keyword][name] = False
