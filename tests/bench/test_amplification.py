"""Files that were edited by hand are counted, in commits that are found by their subject."""

import subprocess
from pathlib import Path

import pytest

from bench.declared import amplification

PAGE = "A page.\n<!-- table: begin -->\n{}\n<!-- table: end -->\n{}"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(amplification, "ROOT", tmp_path)
    git(tmp_path, "init", "-q", "-b", "main")
    write(
        tmp_path,
        {"docs/made.md": PAGE.format("old", ""), "docs/mixed.md": PAGE.format("old", ""), "engine/a.py": "1\n"},
    )
    commit(tmp_path, "start")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def commit(folder: Path, subject: str) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", subject)


def test_generated_files_and_generated_parts_of_pages_do_not_count(repository: Path) -> None:
    write(
        repository,
        {
            "docs/made.md": PAGE.format("new", ""),
            "docs/mixed.md": PAGE.format("new", "and a sentence\n"),
            "protos/quire/v1/a_pb2.py": "x",
            "helm/quire/values.schema.json": "{}",
            "helm/quire/values.yaml": "a: 1\n",
            "engine/a.py": "1\n2\n",
        },
    )
    commit(repository, "add one of a kind")
    found = amplification.edited(amplification.commit_of("add one of a kind"))
    assert found == ["docs/mixed.md", "engine/a.py", "helm/quire/values.yaml"]


def test_lines_of_the_product_are_those_of_its_packages_that_nothing_generates(repository: Path) -> None:
    write(repository, {"services/b.py": "1\n2\n", "services/b_pb2.py": "1\n" * 9, "tests/c.py": "1\n" * 9})
    commit(repository, "more")
    assert amplification.product_lines("HEAD") == 3
    assert amplification.product_lines(amplification.commit_of("start")) == 1


def test_a_port_is_found_as_a_whole_number(repository: Path) -> None:
    write(repository, {"services/b.py": "PORT = 50051\n", "services/c.py": "PORT = 500511\n", "docs/d.md": "50051\n"})
    commit(repository, "ports")
    assert amplification.files_with(50051) == ["HEAD:services/b.py"]


def test_a_commit_that_is_not_there_is_named(repository: Path) -> None:
    with pytest.raises(LookupError, match="no commit has the subject 'nothing'"):
        amplification.commit_of("nothing")
