"""Stores the values of computed cases, so that `make papers` continues where it stopped.

Stored values are used again as long as the arguments of the case, the traces and recorded searches that it reads, and
the code that computes it are the same. Comments and docstrings do not count as code.
"""

import ast
import json
import os
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.loads.memory import DATA_VARIABLE
from bench.papers.case import Case, Values
from bench.papers.rows import MEASURED_CODE, SIMULATED_CODE
from bench.papers.simulation.beam_trace import FILE as SEARCHES
from bench.report.targets import ROOT

_TRACES = (".csv", ".txt")


class Store:
    """A folder with a file for each case."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, case: Case) -> Values | None:
        """Return the values of a case, or None if this code has not computed them."""
        try:
            found = json.loads(self._path(case).read_text())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("key") != _key(case):
            return None
        values: Values | None = found.get("values")
        return values if isinstance(values, dict) and values else None

    def put(self, case: Case, values: Values) -> None:
        """Keep the values of a case. Other processes may keep theirs in the same folder. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._path(case).with_suffix(f".{os.getpid()}.unfinished")
        unfinished.write_text(json.dumps({"key": _key(case), "values": values}))
        unfinished.replace(self._path(case))

    def _path(self, case: Case) -> Path:
        return self._folder / f"{case.name}.json"


def _key(case: Case) -> str:
    code = [code_digest(ROOT / source) for source in (MEASURED_CODE if case.timed else SIMULATED_CODE)]
    own = code_digest(ROOT / f"{case.run.__module__.replace('.', '/')}.py")
    searches = [file_digest(SEARCHES)] if case.arguments.get("beams") else []
    parts = [
        case.arguments,
        case.run.__qualname__,
        code,
        own,
        *searches,
        _traces_digest(os.environ.get(DATA_VARIABLE, "")),
    ]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@cache
def _traces_digest(folder: str) -> str:
    digest = sha256()
    for file in sorted(Path(folder).glob("*.*")) if folder else ():
        if file.suffix in _TRACES:
            digest.update(file.name.encode() + sha256(file.read_bytes()).digest())
    return digest.hexdigest()


@cache
def code_digest(path: Path) -> str:
    """Return a digest of a file, or of a folder's modules and coefficients, without comments and docstrings."""
    digest = sha256()
    for file in sorted(_files(path)):
        text = file.read_text()
        digest.update(f"{file.name}\0{_without_words(text) if file.suffix == '.py' else text}\0".encode())
    return digest.hexdigest()


def _files(path: Path) -> Iterable[Path]:
    return [one for kind in ("py", "toml") for one in path.rglob(f"*.{kind}")] if path.is_dir() else [path]


def file_digest(path: Path) -> str:
    """Return a digest of a file's bytes, of none if it is missing."""
    return sha256(path.read_bytes() if path.exists() else b"").hexdigest()


def _without_words(source: str) -> str:
    tree = ast.parse(source)
    for node in _documented(tree):
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def _documented(tree: ast.Module) -> Iterator[Any]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds))
