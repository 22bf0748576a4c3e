"""What tests of the deployment need from outside."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.deployment.prometheus import NoPrometheus, prometheus_folder
from tests.running_quire import RunningQuire, start_quires


@pytest.fixture(scope="session")
def commands() -> Path:
    """The folder with prometheus and promtool."""
    try:
        return prometheus_folder()
    except NoPrometheus as reason:
        pytest.skip(f"needs Prometheus: {reason}")


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., list[RunningQuire]]]:
    """Starts one `quire serve` for each tuple of arguments; each has to end well at the end, whatever was before."""
    with ExitStack() as running:

        def start_together(*arguments: tuple[str, ...]) -> list[RunningQuire]:
            quires = start_quires(*arguments)
            for quire in quires:
                running.callback(_ends_well, quire)
            return quires

        yield start_together


def _ends_well(quire: RunningQuire) -> None:
    assert quire.close() == 0
