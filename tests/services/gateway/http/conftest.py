from collections.abc import Iterator

import httpx
import pytest

from tests.running_quire import CALL_SECONDS, RunningQuire


@pytest.fixture(scope="session")
def http(tiny_quire: RunningQuire) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny_quire.http_url, timeout=CALL_SECONDS) as client:
        yield client
