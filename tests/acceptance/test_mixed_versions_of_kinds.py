"""A model with windows on services of the last release and of this tree: who refuses whom, and what serves."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.v1 import gateway_pb2_grpc
from tests.faults import prompt
from tests.reference import near_ties
from tests.running.versions import Fleet, Version, VersionedService
from tests.running_quire import CALL_SECONDS, START_SECONDS, Answer

TOKENS = 20
PROMPTS = [prompt(number, 60 + number, TOKENS) for number in range(4)]


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("windowed")


@pytest.fixture
def fleet(model: Path, tmp_path: Path) -> Iterator[Callable[[Version], Fleet]]:
    started: list[Fleet] = []

    def start(version: Version) -> Fleet:
        started.append(Fleet(tmp_path, str(model), version))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def check_answers(services: Fleet, model: Path) -> None:
    stub = gateway_pb2_grpc.GatewayStub(services.gateways[0].channel)
    answers = [Answer.of(stub.Generate(request, timeout=CALL_SECONDS)) for request in PROMPTS * 2]
    texts = [list(request.prompt.token_ids.ids) for request in PROMPTS * 2]
    assert near_ties(model, texts, [answer.token_ids for answer in answers], TOKENS) <= len(PROMPTS)


def kinds_of(services: Fleet) -> dict[str, int]:
    """Return how many window kinds the pool of each engine has."""
    return {name: len(pool.kinds) for name, pool in services.pools().items()}


def test_an_engine_with_kinds_says_that_an_older_kv_manager_lacks_them_and_serves_without_or_with_a_newer_one(
    old: Version, new: Version, fleet: Callable[[Version], Fleet], model: Path
) -> None:
    services = fleet(old)
    refused = services.start_engine("one-again", new)
    said = refused.output.wait_for("lacks register.kinds: it is of an older version", START_SECONDS)
    assert "start the engine with --kinds off" in said
    assert set(kinds_of(services).values()) == {0}
    services.replace("gateway", new, lambda: None)
    check_answers(services, model)
    end(refused, services)
    services.add_engine("two-again", new, "--kinds", "off")
    assert services.engines.pop("one").close() == 0
    assert services.engines.pop("two").close() == 0
    assert kinds_of(services)["two-again"] == 0
    check_answers(services, model)
    services.replace("kvmanager", new, lambda: None)
    services.add_engine("one-again", new)
    assert {name: kinds_of(services)[name] for name in ("one-again", "two-again")} == {"one-again": 1, "two-again": 0}
    check_answers(services, model)
    services.close()


def end(service: VersionedService, services: Fleet) -> None:
    service.kill()
    service.process.wait()
    services.all.remove(service)


def test_engines_of_the_last_release_keep_serving_when_the_kv_manager_knows_kinds(
    old: Version, new: Version, fleet: Callable[[Version], Fleet], model: Path
) -> None:
    services = fleet(old)
    services.replace("kvmanager", new, lambda: None)
    assert kinds_of(services) == {"one": 0, "two": 0}
    check_answers(services, model)
    services.replace("engine", new, lambda: None)
    assert set(kinds_of(services).values()) == {1}
    check_answers(services, model)
    services.close()
