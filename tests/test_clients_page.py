"""docs/clients.md has the packages of the lock files, in their versions."""

import json
import re

from tests.acceptance.python_clients import LOCKS
from tests.acceptance.python_environments import asked
from tests.code_index import ROOT
from tests.services.gateway.http.clients import node_client

PAGE = (ROOT / "docs" / "clients.md").read_text()
_OF_TESTS = {"pytest", "fastapi", "soundfile"}


def table(language: str) -> dict[str, str]:
    mark = f"<!-- versions of {language}'s clients: "
    rows = PAGE.split(f"{mark}begin -->")[1].split(f"{mark}end -->")[0].strip().splitlines()[2:]
    return {name: version for name, version, _ in (row.strip("| ").split(" | ") for row in rows)}


def test_pythons_table_has_the_versions_of_the_lock_files() -> None:
    newest, older = (asked(lock) for lock in LOCKS.values())
    locked = {re.sub(r"\[.*", "", name): version for name, version in {**older, **newest}.items()}
    assert table("Python") == {name: version for name, version in locked.items() if name not in _OF_TESTS}
    assert f"openai {older['openai']}, because" in PAGE


def test_nodes_table_has_the_versions_of_the_lock_file() -> None:
    assert table("Node") == node_client.asked()
    packages = json.loads(node_client.LOCK.read_text())["packages"]
    assert {name: packages[f"node_modules/{name}"]["version"] for name in node_client.asked()} == node_client.asked()


def test_lock_files_name_no_index() -> None:
    for text in (node_client.LOCK.read_text(), *(lock.read_text() for lock in LOCKS.values())):
        assert "resolved" not in text
        assert "://" not in text
