"""What checks read from their environment: the server, and its keys."""

import os

import pytest


@pytest.fixture(scope="session")
def base_url() -> str:
    """The server's address with /v1."""
    return os.environ["BASE_URL"]


@pytest.fixture(scope="session")
def root_url(base_url: str) -> str:
    """The server's address, as clients of Anthropic's API want it."""
    return base_url.removesuffix("/v1")


@pytest.fixture(scope="session")
def key() -> str:
    """A key without limits."""
    return os.environ["KEY"]


@pytest.fixture(scope="session")
def spent_key() -> str:
    """A key whose tenant has used its tokens for hours."""
    return os.environ["SPENT_KEY"]
