"""How far results are behind the code that they measured, in repositories made for the test."""

from pathlib import Path

import pytest

from bench.report import staleness
from bench.report.staleness import commits_behind
from tests.bench.repositories import change, git


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    git(tmp_path, "init", "-q")
    monkeypatch.setattr(staleness, "ROOT", tmp_path)
    staleness.is_ancestor.cache_clear()
    return tmp_path


def test_only_changes_of_the_measured_code_count(repository: Path) -> None:
    measured = change(repository, "engine/kernel.py", "1")
    change(repository, "docs/page.md", "1")
    assert commits_behind(measured, ["engine"]) == 0
    change(repository, "engine/kernel.py", "2")
    change(repository, "kvmanager/pool.py", "1")
    assert commits_behind(measured, ["engine"]) == 1
    assert commits_behind(measured, ["engine", "kvmanager"]) == 2


def test_staleness_is_computed_as_of_a_commit(repository: Path) -> None:
    measured = change(repository, "engine/kernel.py", "1")
    page = change(repository, "docs/page.md", "1")
    change(repository, "engine/kernel.py", "2")
    assert commits_behind(measured, ["engine"], at=page) == 0
    assert commits_behind(measured, ["engine"]) == 1


def test_a_commit_that_is_unknown_or_of_another_history_is_infinitely_behind(repository: Path) -> None:
    change(repository, "engine/kernel.py", "1")
    assert commits_behind("0123abcd", ["engine"]) is None
    assert commits_behind(None, ["engine"]) is None
    assert commits_behind("--all", ["engine"]) is None
    root = git(repository, "rev-parse", "HEAD")
    git(repository, "checkout", "-q", "--orphan", "other")
    other = change(repository, "engine/kernel.py", "3")
    assert commits_behind(other, ["engine"], at=root) is None


def test_a_dirty_tree_counts_from_its_commit(repository: Path) -> None:
    measured = change(repository, "engine/kernel.py", "1")
    change(repository, "engine/kernel.py", "2")
    assert commits_behind(f"{measured}-dirty", ["engine"]) == 1
