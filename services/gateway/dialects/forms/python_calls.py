"""Calls written as in Python: `name(key=value, other="text")`."""

import ast
import json
import re
import string
from dataclasses import dataclass
from typing import Any

from services.gateway.dialects.forms.call_form import Around, CallTarget, WrittenCall
from services.gateway.dialects.scanner import Reading, Scanner
from services.wire.requests.argument_texts import ArgumentTexts

_STRUCTURE = re.compile(r"""\\.|["'()\[\]{}]""", re.DOTALL)
_NAME = string.ascii_letters + string.digits + "_."
_JSON_NAMES = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class PythonCalls:
    """A call with keyword arguments that are literals, of Python or JSON. It is passed on when it is whole."""

    @property
    def marks(self) -> tuple[str, ...]:
        """See CallForm."""
        return ()

    def read(self, target: CallTarget) -> Reading[bool]:
        """See CallForm."""
        name = yield from target.scan.one_of(target.tools.names)
        if name is None or not (yield from target.scan.expect("(")):
            return False
        text = yield from _up_to_parenthesis(target.scan)
        return target.whole(name, None if text is None else _arguments(text))

    @property
    def argument_texts(self) -> ArgumentTexts:
        """See CallForm. Values are those of JSON, which Python reads, too, but for three names."""
        return ArgumentTexts(before_value="=", separator=", ")

    def around(self, name: str) -> Around:
        """See CallForm."""
        return Around(f"{name}(", ")")

    def passes(self, target: CallTarget) -> Reading[bool]:
        """See CallForm."""
        start = target.scan.at
        yield from target.scan.skip(_NAME)
        if target.scan.at == start or not (yield from target.scan.expect("(")):
            return False
        return (yield from _up_to_parenthesis(target.scan)) is not None

    def written(self, call: WrittenCall) -> str:
        """See CallForm."""
        return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in json.loads(call.arguments).items())})"


def _up_to_parenthesis(scan: Scanner) -> Reading[str | None]:
    """Read up to the parenthesis that closes a call, and it; return the text in front of it, None if there is none."""
    start = at = scan.at
    depth, quote = 1, ""
    while True:
        text = scan.since(start) + scan.available()
        at = max(at, start)
        for found in _STRUCTURE.finditer(text, at - start):
            mark, at = found[0], start + found.end()
            if quote:
                quote = "" if mark == quote else quote
            elif mark in "\"'":
                quote = mark
            elif mark in "([{":
                depth += 1
            elif mark in ")]}":
                depth -= 1
                if not depth:
                    scan.at = at
                    return text[: found.start()]
        at = max(at, start + len(text) - text.endswith("\\"))
        if scan.ended:
            return None
        yield


def _arguments(text: str) -> dict[str, Any] | None:
    """Return keyword arguments, None if the text has others, or values that JSON does not have."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        found = {str(one.arg): _literal(one.value) for one in call.keywords if one.arg}
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return found if len(found) == len(call.keywords) else None


def _literal(node: ast.expr) -> Any:
    for inner in ast.walk(node):
        if isinstance(inner, ast.List | ast.Tuple):
            inner.elts = [_constant(one) for one in inner.elts]
        elif isinstance(inner, ast.Dict):
            inner.values = [_constant(one) for one in inner.values]
    return ast.literal_eval(_constant(node))


def _constant(node: ast.expr) -> ast.expr:
    is_name = isinstance(node, ast.Name) and node.id in _JSON_NAMES
    return ast.Constant(_JSON_NAMES[node.id]) if is_name else node  # type: ignore[attr-defined]
