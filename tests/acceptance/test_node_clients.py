"""Unmodified clients for Node with the scripted engine. Each runs its own tests, in clients/node/."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import Record
from tests.acceptance.scripted_quire import ScriptedQuire, scripted_quire
from tests.services.gateway.http.clients.node_client import CHECKS, NoNodeClient, run_check, versions


@pytest.fixture(scope="module")
def scripted(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedQuire]:
    with scripted_quire(demo_model, tmp_path_factory.mktemp("scripted")) as one:
        yield one


@pytest.mark.parametrize("client", sorted(path.stem.removeprefix("check_") for path in CHECKS.glob("check_*.mjs")))
def test_the_client_has_its_conversation(scripted: ScriptedQuire, client: str, record: Record) -> None:
    try:
        record(versions=versions())
        done = run_check(client, scripted.environment())
    except NoNodeClient as reason:
        pytest.skip(str(reason))
    assert done.returncode == 0, done.stdout + done.stderr
