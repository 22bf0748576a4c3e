from pathlib import Path

import pytest

from tests.deployment.prometheus import NoPrometheus, prometheus_folder


@pytest.fixture(scope="session")
def commands() -> Path:
    """The folder with prometheus and promtool."""
    try:
        return prometheus_folder()
    except NoPrometheus as reason:
        pytest.skip(f"needs Prometheus: {reason}")
