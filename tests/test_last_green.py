"""The file of the commits at which the checks beyond `make check` passed last."""

import sys
from pathlib import Path

import pytest

from bench.report.staleness import has_history, is_ancestor
from tests import last_green

ROOT = Path(__file__).parent.parent


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Runs":
    return Runs(tmp_path, monkeypatch)


class Runs:
    """Runs a test that passes, or fails, as a check."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        self._file = folder / "last_green.json"

    def __call__(self, commit: str | None, *tests: str) -> tuple[int, last_green.Kept]:
        self._monkeypatch.setenv("QUIRE_COMMIT", commit) if commit else self._monkeypatch.delenv("QUIRE_COMMIT")
        module = self._folder / "test_case.py"
        module.write_text("import pytest\n" + "\n".join(tests))
        pytest_alone = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--rootdir"]
        status = last_green.run("wheel", [*pytest_alone, str(self._folder), str(module)], self._file)
        return status, last_green.kept(self._file)


PASSES = "def test_passes(): pass"
SKIPPED = "@pytest.mark.skip\ndef test_skipped(): pass"
FAILS = "def test_fails(): assert False"


def test_a_check_that_passes_keeps_its_commit_and_counts(run: Runs) -> None:
    status, kept = run("0123abc", PASSES, SKIPPED)
    assert status == 0
    assert kept["wheel"].items() >= {"commit": "0123abc", "passed": 1, "skipped": 1}.items()


def test_a_check_that_fails_changes_nothing(run: Runs) -> None:
    _, before = run("0123abc", PASSES)
    status, kept = run("4567def", PASSES, FAILS)
    assert (status, kept) == (1, before)


def test_a_check_of_changed_files_is_not_kept(run: Runs) -> None:
    status, kept = run("0123abc-dirty", PASSES)
    assert (status, kept) == (0, {})


def test_each_check_has_a_target_that_keeps_its_commit() -> None:
    lines = (ROOT / "Makefile").read_text().split("\n\n")
    keeping = {rule.split(":")[0] for rule in lines if "$(KEEPING)" in rule and not rule.startswith("#")}
    assert keeping == set(last_green.CHECKS)


def test_the_file_has_commits_of_this_history() -> None:
    assert last_green.kept().keys() <= set(last_green.CHECKS)
    if has_history():
        assert [row for row in last_green.kept().values() if not is_ancestor(str(row["commit"]), "HEAD")] == []
