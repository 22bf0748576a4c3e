"""A client's schema as llguidance gets it, and what was left out of it."""

import json
from copy import deepcopy
from typing import Any

from services.engine.guided.schemas.finite_schemas import required_of
from services.engine.guided.schemas.json_schemas import SchemaPreparation
from services.engine.guided.schemas.schema_nodes import (
    Case,
    DecimalLiteral,
    InvalidSchema,
    SchemaNode,
    UnsupportedSchema,
    mapping,
)

_MAX_OMITTED = 16


class PreparedSchema:
    """A schema for llguidance whose texts are all valid under a client's schema.

    A case of `anyOf` or `oneOf` that cannot be followed is left out: texts of the other cases are valid. With `oneOf`
    they are only if no text of the case is one of theirs; `whole` shows that.

    `omitted` says what was left out. `counted` are schemas of keys that must not run out, with their paths. `names` are
    the keys that the schema lists, as they are written; None if it has no `patternProperties`.
    """

    def __init__(self, root: SchemaNode) -> None:
        """Prepare a schema in place. Raises InvalidSchema."""
        self.root = root
        self.omitted: list[str] = []
        self._left_out: list[tuple[Case, SchemaNode, SchemaNode]] = []  # with the case, and the part at fault
        self._excludes = False  # it has a `oneOf`
        self._prepare()

    @property
    def whole(self) -> SchemaNode | None:
        """A schema with the omitted cases, whose parts at fault admit more; None if it is not needed.

        If llguidance compiles it, it has found that the cases of each `oneOf` do not overlap.
        """
        if not (self.omitted and self._excludes):
            return None
        copies: dict[int, Any] = {}
        for case, schema, _ in self._left_out:
            case.cases[case.at] = schema
        copy: SchemaNode = deepcopy(self.root, copies)
        for case, _, fault in self._left_out:
            case.cases[case.at] = False
            part = copies[id(fault)]
            kept = {} if "nullable" in part else {keyword: part[keyword] for keyword in ("type",) if keyword in part}
            part.clear()
            part.update(kept)
        return copy

    def omit(self, cases: list[Case], part: SchemaNode, fault: str) -> bool:
        """Leave out the innermost case around a part at fault that is not the last of its list. False if there is none.

        Raises InvalidSchema if nothing that is left has a finite text.
        """
        if not self._leave_out(cases, part, fault):
            return False
        self._prepare()
        return True

    def _prepare(self) -> None:
        while True:
            preparation = SchemaPreparation(self.root)
            try:
                preparation.run()
            except UnsupportedSchema as error:
                if not self._leave_out(preparation.cases, preparation.part, str(error)):
                    raise
            else:
                break
        self._excludes = any("oneOf" in node for node, _ in preparation.nodes)
        self.counted = _counted_keys(preparation.nodes)
        self.names = _listed_names(preparation.nodes)

    def _leave_out(self, cases: list[Case], part: SchemaNode, fault: str) -> bool:
        for case in reversed(cases if len(self.omitted) < _MAX_OMITTED else []):
            if sum(one is not False for one in case.cases) > 1:
                self._left_out.append((case, case.cases[case.at], part))
                self.omitted.append(f"{case.path} was left out: {fault}")
                case.cases[case.at] = False
                return True
        return False


def prepare_schema(text: str) -> PreparedSchema:
    """Prepare a schema. Raises InvalidSchema, ValueError for malformed JSON, or RecursionError."""
    schema = json.loads(text, parse_float=DecimalLiteral, parse_constant=_refuse_constant)
    if schema is True:
        schema = {}  # equivalent, and accepts options
    if not isinstance(schema, dict):
        raise InvalidSchema(
            f"#: {'no output matches it' if schema is False else 'a schema must be an object or a boolean'}"
        )
    return PreparedSchema(schema)


def _refuse_constant(name: str) -> None:
    raise InvalidSchema(f"{name} is not a JSON number")


def _counted_keys(nodes: list[tuple[SchemaNode, str]]) -> list[tuple[str, str]]:
    """Return schemas of the keys that objects need beyond the required ones, where only patterns admit them."""
    found = []
    for node, path in nodes:
        required = required_of(node)
        missing = node.get("minProperties", 0) - len(required)
        if missing > 1 and node.get("additionalProperties") is False and "patternProperties" in node:
            patterns = {
                name: {"const": 0} for name, part in mapping(node, "patternProperties").items() if part is not False
            }
            keys = {"type": "object", "additionalProperties": False, "patternProperties": patterns}
            taken = dict.fromkeys([*mapping(node, "properties"), *required], False)
            found.append((json.dumps(keys | {"properties": taken, "minProperties": missing}), path))
    return found


def _listed_names(nodes: list[tuple[SchemaNode, str]]) -> frozenset[bytes] | None:
    if not any("patternProperties" in node for node, _ in nodes):
        return None
    names = {name for node, _ in nodes for name in (*mapping(node, "properties"), *required_of(node))}
    return frozenset(json.dumps(name, ensure_ascii=False)[1:-1].encode(errors="replace") for name in names)
