"""Limits of folders, files, classes and functions; unique class names; no circular imports."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median, quantiles

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("blocks", "engine", "kvmanager", "services", "bench", "deploy", "helm", "simulation")
MAX_FILES, MAX_LINES, MAX_METHODS = 24, 600, 25
MAX_MEDIAN, MAX_P90 = 7, 16

# Class names are unique within each entry; those of `blocks` in the whole tree.
SERVICES = {
    "engine": ("engine", "services/engine"),
    "kvmanager": ("kvmanager", "services/kvmanager"),
    "gateway": ("services/gateway",),
    "loadgen": ("services/loadgen",),
    "cli": ("services/cli",),
    "wire": ("services/wire",),
    "runtime": ("services/runtime", "services/models"),
    "bench": ("bench",),
}


@cache
def files() -> dict[Path, str]:
    """The source of every hand-written file by its path."""
    paths = [path for room in PRODUCT for kind in ("py", "h", "cpp") for path in (ROOT / room).rglob(f"*.{kind}")]
    return {path.relative_to(ROOT): path.read_text() for path in sorted(paths) if "build" not in path.parts}


@cache
def modules() -> dict[str, ast.Module]:
    return {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__"): ast.parse(text)
        for path, text in files().items()
        if path.suffix == ".py"
    }


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for name, tree in modules().items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def public_classes(rooms: tuple[str, ...]) -> dict[str, list[str]]:
    """The modules that define each public class at their top level."""
    found: dict[str, list[str]] = defaultdict(list)
    prefixes = tuple(f"{room.replace('/', '.')}." for room in rooms)
    for name, tree in modules().items():
        if f"{name}.".startswith(prefixes):
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(name)
    return found


def methods(node: ast.ClassDef) -> int:
    return sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)


def test_no_folder_has_more_than_24_files() -> None:
    folders: dict[Path, int] = defaultdict(int)
    for path in files():
        folders[path.parent] += 1
    assert {str(folder): count for folder, count in folders.items() if count > MAX_FILES} == {}


def test_no_file_is_longer_than_600_lines() -> None:
    lengths = {str(path): text.count("\n") for path, text in files().items()}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_class_has_more_than_25_methods() -> None:
    assert {f"{name}.{one.name}": methods(one) for name, one in classes() if methods(one) > MAX_METHODS} == {}


def test_functions_are_short() -> None:
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert median(lengths) <= MAX_MEDIAN
    assert quantiles(lengths, n=10)[-1] <= MAX_P90


@pytest.mark.parametrize("service", SERVICES)
def test_no_public_class_name_is_used_twice_in_a_service(service: str) -> None:
    assert {name: where for name, where in public_classes(SERVICES[service]).items() if len(where) > 1} == {}


def test_no_class_name_of_blocks_is_used_elsewhere() -> None:
    elsewhere = public_classes(tuple(room for room in PRODUCT if room != "blocks"))
    assert {name: elsewhere[name] for name in public_classes(("blocks",)) if name in elsewhere} == {}


def imported(name: str) -> set[str]:
    """The product modules that a module imports, inside functions too."""
    found = set()
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {one if one in modules() else node.module for one in names}
    return {one for one in found if one in modules() and one != name}


def import_cycles() -> list[list[str]]:
    """Sets of modules that import each other, by Tarjan's algorithm (SIAM J. Comput. 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for other in sorted(imported(name)):
            if other not in number:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], number[other])
        if lowest[name] == number[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(stack[at:])
            del stack[at:]

    for name in modules():
        if name not in number:
            visit(name)
    return found


def test_there_are_no_circular_imports() -> None:
    assert import_cycles() == []
