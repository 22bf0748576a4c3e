"""For clients in their own environment: the server that BASE_URL names, with the demo model."""

import os

import pytest


@pytest.fixture(scope="session")
def base_url() -> str:
    return os.environ["BASE_URL"]
