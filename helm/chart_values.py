"""Path, default and meaning of each value in values.yaml."""

from dataclasses import dataclass
from typing import Any

import yaml

_MEANING = "# -- "


@dataclass(frozen=True)
class Value:
    """A key of values.yaml. A section has keys below it; all others are values."""

    path: tuple[str, ...]
    default: Any
    meaning: str
    section: bool

    @property
    def name(self) -> str:
        """Name for `--set`."""
        return ".".join(self.path)


def values_of(text: str) -> list[Value]:
    """Return the keys of a YAML text in their order.

    The comment above a key describes it and begins with `# -- `. Raises ValueError for a value without one.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    return list(_below(root, (), yaml.safe_load(text), text.splitlines()))


def _below(node: yaml.MappingNode, path: tuple[str, ...], defaults: dict[str, Any], lines: list[str]) -> list[Value]:
    found = []
    for key, inner in node.value:
        here = (*path, key.value)
        default = defaults[key.value]
        comment = _comment_above(key.start_mark.line, lines)
        described = comment.startswith(_MEANING)
        section = bool(default) and isinstance(default, dict) and not described
        if not (described or section):
            raise ValueError(f"{'.'.join(here)} must have a comment above it that begins with `{_MEANING}`")
        found.append(Value(here, default, _plain(comment) if described else "", section))
        if section:
            found += _below(inner, here, default, lines)
    return found


def _comment_above(line: int, lines: list[str]) -> str:
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return "\n".join(row.lstrip() for row in lines[first:line])


def _plain(comment: str) -> str:
    return " ".join(row.removeprefix("#").strip() for row in comment.removeprefix(_MEANING).splitlines())
