"""Unmodified clients and agent frameworks. Each runs its own tests, in clients/.

With the scripted engine they have conversations of three turns with two tools; with the demo model they do what does
not depend on its choice.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import Record
from tests.acceptance.python_clients import clients, environment_of, run_checks
from tests.acceptance.scripted_quire import ScriptedQuire, scripted_quire
from tests.running_quire import RunningQuire, start_quire


@pytest.fixture(scope="module")
def demo() -> Iterator[RunningQuire]:
    one = start_quire("--model", "demo", "--http-listen", "127.0.0.1:0")
    yield one
    assert one.settled_pool().sequences == 0
    assert one.close() == 0


@pytest.fixture(scope="module")
def scripted(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedQuire]:
    with scripted_quire(demo_model, tmp_path_factory.mktemp("scripted")) as one:
        yield one


@pytest.mark.parametrize("client", clients("demo"))
def test_the_client_works_unchanged(demo: RunningQuire, client: str) -> None:
    done = run_checks(f"demo/{client}", {"BASE_URL": f"{demo.http_url}/v1"})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("client", clients("scripted"))
def test_the_client_has_its_conversation(scripted: ScriptedQuire, client: str, record: Record) -> None:
    record(versions=environment_of(client).versions())
    done = run_checks(f"scripted/{client}", scripted.environment())
    assert done.returncode == 0, done.stdout + done.stderr
