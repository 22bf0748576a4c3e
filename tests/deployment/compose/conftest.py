"""Builds the image once, and writes the report of a run without failures."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployment.compose.report import Report
from tests.deployment.compose.stack import BUILD_SECONDS, Stack

_REPORT = pytest.StashKey[Report]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_REPORT] = Report()


@pytest.fixture(scope="session", autouse=True)
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The image of this source, without earlier volumes. Stacks of one session share volumes, and so the model.

    Its layers stay cached between runs.
    """
    stack = Stack(tmp_path_factory.mktemp("stack"))
    stack.down(volumes=True)
    stack.copy_source()
    stack.succeed("build", "gateway", seconds=BUILD_SECONDS)
    yield
    stack.down(volumes=True)


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    return pytestconfig.stash[_REPORT]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):  # type: ignore[no-untyped-def]
    made = yield
    if made.when == "call" or made.skipped:
        sentence = item.name.removeprefix("test_").replace("_", " ")
        reason = f" ({made.longrepr[2].removeprefix('Skipped: ')})" if made.skipped else ""
        item.config.stash[_REPORT].outcomes.append((sentence, made.outcome + reason, made.duration))
    return made


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the page if all tests were selected and passed."""
    complete = {item.path for item in session.items} >= set(Path(__file__).parent.glob("test_*.py"))
    options = session.config.option
    partial = options.keyword or options.markexpr or options.collectonly
    if exitstatus == 0 and complete and not partial:
        session.config.stash[_REPORT].write()
