"""A pytest plugin: coverage by test, and the seconds that each test takes, for the choice of tests of a fault."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

SECONDS_FILE = "QUIRE_MUTANTS_SECONDS"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Give all that runs for a test, fixtures too, its node id as its context."""
    measured = coverage.Coverage.current()
    if measured is None:
        return (yield)
    measured.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        measured.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the seconds and outcome of each phase where they happen: in workers, or where there are none."""
    if hasattr(report, "node"):  # from a worker, which has written it
        return
    with Path(os.environ[SECONDS_FILE]).open("a") as lines:
        lines.write(json.dumps([report.nodeid, report.duration, report.outcome]) + "\n")
