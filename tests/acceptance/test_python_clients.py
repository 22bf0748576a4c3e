"""Unmodified clients and agent frameworks with the demo model. Each runs its own tests, in clients/."""

from collections.abc import Iterator

import pytest

from tests.acceptance.python_clients import CHECKS, run_checks
from tests.running_quire import RunningQuire, start_quire

CLIENTS = sorted(path.stem.removeprefix("check_") for path in CHECKS.glob("check_*.py"))


@pytest.fixture(scope="module")
def demo() -> Iterator[RunningQuire]:
    one = start_quire("--model", "demo", "--http-listen", "127.0.0.1:0")
    yield one
    assert one.settled_pool().sequences == 0
    assert one.close() == 0


@pytest.mark.parametrize("client", CLIENTS)
def test_the_client_works_unchanged(demo: RunningQuire, client: str) -> None:
    done = run_checks(client, f"{demo.http_url}/v1")
    assert done.returncode == 0, done.stdout + done.stderr
