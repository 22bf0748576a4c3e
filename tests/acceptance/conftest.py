"""Acceptance runs are long and can be resumed: cases that passed with the same code are skipped.

Each case appends a JSON row to `bench/results/acceptance.jsonl`: the case, its result, its figures, and a fingerprint
of the code. Delete the file to run everything again.
"""

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.repetitions import LONG
from tests.running.versions import Version, extract, last_release

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "bench" / "results" / "acceptance.jsonl"
CODE = ("blocks", "kvmanager", "engine", "services", "protos")
SOURCES = (".py", ".cpp", ".h")

Record = Callable[..., None]

_FAILED = pytest.StashKey[bool]()
_CODE = pytest.StashKey[str]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip cases that passed with the same code, before their fixtures start anything."""
    done = {(row["case"], row["code"]) for row in _rows() if row["passed"]}
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.stash[_CODE] = _code(item.path)
            if (_case(item), item.stash[_CODE]) in done:
                item.add_marker(pytest.mark.skip(reason="passed with the same code in an earlier run"))


@pytest.fixture(scope="module")
def new() -> Version:
    """This tree."""
    return Version("new", ROOT)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Version:
    """The tree of the last release."""
    version, commit = last_release()
    tree = extract(commit, tmp_path_factory.mktemp("release") / version)
    if tree is None:
        pytest.skip(f"this clone lacks the commit of release {version}, {commit}: fetch it")
    return Version("old", tree)


@pytest.fixture(autouse=True)
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    """Takes a case's figures by name, and writes its row at the end."""
    figures: dict[str, Any] = {}
    started = time.monotonic()
    yield figures.update
    row = {
        "case": _case(request.node),
        "passed": not request.node.stash.get(_FAILED, False),
        "figures": figures,
        "seconds": round(time.monotonic() - started, 1),
        "commit": _commit(),
        "code": request.node.stash[_CODE],
    }
    ROWS.parent.mkdir(exist_ok=True)
    with ROWS.open("a") as rows:
        rows.write(json.dumps(row) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


def _case(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/acceptance/")


@cache
def _code(test_file: Path) -> str:
    """Hash the test, its shared modules and every source file that can change its result."""
    digest = hashlib.sha256(test_file.read_bytes())
    here = Path(__file__).parent
    folders = (here, *(ROOT / "tests" / folder for folder in ("", "engine", "running")))
    shared = [one for folder in folders for one in folder.glob("*.py") if not one.name.startswith("test_")]
    digest.update(os.environ.get("QUIRE_NEWEST_CLIENTS", "").encode())
    if LONG:  # passed with fewer repetitions is not enough
        digest.update(b"long")
    for file in sorted([*shared, *here.glob("clients/**/*.*"), *here.glob("routers/**/*.*")]):
        digest.update(file.name.encode() + file.read_bytes())
    for folder in (*CODE, "simulation") if "simulation" in test_file.stem else CODE:
        for file in sorted(one for one in (ROOT / folder).rglob("*") if one.suffix in SOURCES):
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def _commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"
