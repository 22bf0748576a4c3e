"""What happens to an engine, or to the gateway's link to it, while streams run: the streams go on at another one."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.failover import FAULTS, Failing, Fault, check_equal, failovers, streams
from tests.faults import Processes
from tests.running_quire import Answer

STREAMS = 32
TOKENS = 60


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    assert processes.end() == []


@pytest.fixture(scope="module")
def services(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, processes: Processes
) -> Iterator[Failing]:
    services = Failing(tmp_path_factory.mktemp("sockets"), str(tiny_model("llama")), keep=processes.keep)
    yield services
    assert services.close() == [0, 0]


@pytest.fixture(scope="module")
def undisturbed(services: Failing) -> list[Answer]:
    """What all streams tell when nothing happens."""
    running = services.run(streams(STREAMS, TOKENS, "undisturbed"))
    assert running.codes() == {}
    assert failovers(running.answers) == 0
    return running.answers


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_streams_go_on_elsewhere_with_exactly_what_they_would_have_told(
    services: Failing, undisturbed: list[Answer], fault: Fault, request: pytest.FixtureRequest
) -> None:
    services.mend()
    draw = random.Random(request.node.name)
    running = services.run(streams(STREAMS, TOKENS, request.node.name))
    running.wait_for_tokens(draw.randrange(STREAMS, STREAMS * TOKENS // 2))
    fault(services, draw)
    assert running.codes() == {}
    check_equal(running.answers, undisturbed)
    assert failovers(running.answers) > 0
    services.check_that_nothing_is_left()
