"""Unmodified clients for Node with the scripted engine and the demo model. Their tests are in clients/node/."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.acceptance.conftest import Record
from tests.acceptance.scripted_quire import ScriptedQuire, scripted_quire
from tests.running_quire import start_quire
from tests.services.gateway.http.clients.node_client import CHECKS, NoNodeClient, run_check, versions


@pytest.fixture(scope="module")
def scripted(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedQuire]:
    with scripted_quire(demo_model, tmp_path_factory.mktemp("scripted")) as one:
        yield one


@pytest.mark.parametrize("client", sorted(path.stem.removeprefix("check_") for path in CHECKS.glob("check_*.mjs")))
def test_the_client_has_its_conversation(scripted: ScriptedQuire, client: str, record: Record) -> None:
    try:
        record(versions=versions())
        done = run_check(f"check_{client}", scripted.environment())
    except NoNodeClient as reason:
        pytest.skip(str(reason))
    assert done.returncode == 0, done.stdout + done.stderr


def test_forced_calls_of_the_demo_model_are_read() -> None:
    with closing(start_quire("--model", "demo", "--http-listen", "127.0.0.1:0")) as demo:
        try:
            done = run_check("demo", {"BASE_URL": f"{demo.http_url}/v1"})
        except NoNodeClient as reason:
            pytest.skip(str(reason))
        assert done.returncode == 0, done.stdout + done.stderr
        assert demo.settled_pool().sequences == 0
