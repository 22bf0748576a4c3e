"""Twenty times each, at random moments: engines and links fail under 32 streams of all kinds on the demo model."""

import random
from collections.abc import Iterator

import pytest

from tests.acceptance.conftest import Record
from tests.faults import Processes
from tests.running.failover import CHAINS, FAULTS, Failing, Fault, check_equal, failovers, streams
from tests.running_quire import Answer

ROUNDS = 20
STREAMS = 32
TOKENS = 40
MOST_SECONDS = 300


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    assert processes.end() == []


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, processes: Processes) -> Iterator[Failing]:
    services = Failing(tmp_path_factory.mktemp("sockets"), "demo", keep=processes.keep)
    yield services
    assert services.close() == [0, 0]


@pytest.fixture(scope="module")
def undisturbed(services: Failing) -> list[Answer]:
    """What all streams tell when nothing happens."""
    running = services.run(streams(STREAMS, TOKENS, "undisturbed"), MOST_SECONDS)
    assert running.codes() == {}
    assert failovers(running.answers) == 0
    return running.answers


@pytest.mark.parametrize("fault", (FAULTS | CHAINS).values(), ids=(FAULTS | CHAINS).keys())
def test_streams_go_on_elsewhere_with_exactly_what_they_would_have_told(
    services: Failing, undisturbed: list[Answer], fault: Fault, record: Record
) -> None:
    moved = 0
    for rounds in range(1, ROUNDS + 1):
        services.mend()
        salt = f"{fault.__name__} {rounds}"
        draw = random.Random(salt)
        running = services.run(streams(STREAMS, TOKENS, salt), MOST_SECONDS)
        running.wait_for_tokens(draw.randrange(STREAMS * TOKENS * 2 // 3))
        fault(services, draw)
        assert running.codes() == {}
        check_equal(running.answers, undisturbed)
        services.check_that_nothing_is_left()
        moved += failovers(running.answers)
        record(
            rounds=rounds,
            streams=rounds * STREAMS,
            samples=rounds * sum(len(answer.finished.samples) for answer in undisturbed),
            tokens=rounds * sum(answer.finished.usage.generated_tokens for answer in undisturbed),
            streams_that_went_on_elsewhere=moved,
            other_tokens=0,
        )
    assert moved > 2 * ROUNDS
