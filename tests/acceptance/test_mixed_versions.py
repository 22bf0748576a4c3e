"""Services of the last release and of this tree serve together under load, in each pair and in both directions.

An upgrade and a rollback follow docs/upgrade.md; an upgrade in the opposite order has the pairs that these never have.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from quire.v1 import engine_pb2, engine_pb2_grpc, gateway_pb2, gateway_pb2_grpc, pins_pb2
from services.wire.features import FEATURES
from tests.acceptance.conftest import Record
from tests.faults import wait_until
from tests.running.failover import check_equal, failovers, streams
from tests.running.versions import Fleet, Load, Version
from tests.running_quire import CALL_SECONDS, Answer

TOKENS = 60
UPGRADE = ("kvmanager", "engine", "gateway")
ROLLBACK = UPGRADE[::-1]


@pytest.fixture
def fleet(tiny_model: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[[Version], Fleet]]:
    started: list[Fleet] = []

    def start(version: Version) -> Fleet:
        started.append(Fleet(tmp_path, str(tiny_model("llama")), version))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def without_new_fields(request: gateway_pb2.GenerateRequest) -> gateway_pb2.GenerateRequest:
    request.logit_rules.ClearField("bad_words")
    return request


REQUESTS = [without_new_fields(request) for request in streams(16, TOKENS, "")]


def generate(gateway: grpc.Channel, request: gateway_pb2.GenerateRequest) -> Answer:
    return Answer.of(gateway_pb2_grpc.GatewayStub(gateway).Generate(request, timeout=CALL_SECONDS))


@pytest.fixture(scope="module")
def expected(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, new: Version) -> list[Answer]:
    """The answers of services of one version."""
    fleet = Fleet(tmp_path_factory.mktemp("expected"), str(tiny_model("llama")), new)
    try:
        answers = [generate(fleet.gateways[0].channel, request) for request in REQUESTS]
        fleet.close()
    finally:
        fleet.kill()
    return answers


def pin_and_unpin(fleet: Fleet) -> None:
    """An operator's change of all engines, through the newest gateway."""
    stub = gateway_pb2_grpc.GatewayStub(fleet.gateways[0].channel)
    prompt = gateway_pb2.Prompt(text="A prefix that is longer than a block of sixteen tokens, and then some more. " * 2)
    pin = gateway_pb2.PinPrompt(name="pinned", prompt=prompt)
    pins = stub.Admin(gateway_pb2.AdminRequest(pin_prefix=pin), timeout=CALL_SECONDS).pins
    assert [(one.name, one.pinned) for one in pins] == [("pinned", True)]
    assert (
        stub.Admin(
            gateway_pb2.AdminRequest(unpin_prefix=pins_pb2.UnpinPrefix(name="pinned")), timeout=CALL_SECONDS
        ).pins
        == []
    )


def assert_nothing_held(fleet: Fleet) -> None:
    wait_until(lambda: {one.sequences for one in fleet.pools().values()} == {0}, "all sequences are freed")
    for pool in fleet.pools().values():
        assert (pool.device.held, pool.device.withheld, pool.host.held) == (0, 0, 0)


def test_services_of_the_last_release_run_from_its_tree(old: Version, new: Version) -> None:
    for version in (old, new):
        assert {file.is_relative_to(version.tree) for file in version.imported_files()} == {True}
    assert not old.tree.is_relative_to(new.tree)


@pytest.mark.parametrize(
    ("begin", "end", "order"),
    [("old", "new", UPGRADE), ("new", "old", ROLLBACK), ("old", "new", ROLLBACK)],
    ids=["upgrade", "rollback", "upgrade in the opposite order"],
)
def test_no_stream_is_lost_and_no_token_differs_while_services_are_replaced(
    begin: str,
    end: str,
    order: tuple[str, ...],
    old: Version,
    new: Version,
    fleet: Callable[[Version], Fleet],
    expected: list[Answer],
    record: Record,
) -> None:
    versions = {"old": old, "new": new}
    services = fleet(versions[begin])
    load = Load([gateway.address for gateway in services.gateways], REQUESTS)
    try:
        load.wait_for_answers()
        for kind in order:
            services.replace(kind, versions[end], load.wait_for_answers)
            pin_and_unpin(services)
    finally:
        load.finish()
    check_equal([answer for _, answer in load.answers], [expected[number] for number, _ in load.answers])
    assert failovers([answer for _, answer in load.answers]) > 0
    assert_nothing_held(services)
    services.close()
    assert {service.version.name for service in services.all} == {"old", "new"}
    assert [fault for service in services.all for fault in service.faults()] == []
    record(
        streams=len(load.answers),
        tokens=sum(answer.finished.usage.generated_tokens for _, answer in load.answers),
        streams_that_failed_over=failovers([answer for _, answer in load.answers]),
        lost_streams=0,
        other_tokens=0,
    )


def test_a_request_with_a_field_that_the_last_release_lacks_waits_for_an_engine_that_has_it(
    old: Version, new: Version, fleet: Callable[[Version], Fleet]
) -> None:
    services = fleet(old)
    services.replace("gateway", new, lambda: None)
    request = next(one for one in streams(16, TOKENS, "") if one.logit_rules.bad_words)
    channel = services.gateways[0].channel
    with pytest.raises(grpc.RpcError) as refused:
        generate(channel, request)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "accepts requests with bad_words: they are of an older version" in str(refused.value.details())
    services.add_engine("one-again", new)
    features = {
        name: list(engine_pb2_grpc.EngineStub(engine.channel).GetEngine(engine_pb2.GetEngineRequest()).features)
        for name, engine in services.engines.items()
    }
    assert features == {"one": [], "two": [], "one-again": list(FEATURES)}
    answers = [generate(channel, request) for _ in range(4)]
    for name in ("one", "two"):
        assert services.engines.pop(name).close() == 0
    check_equal([generate(channel, request) for _ in answers], answers)
    assert_nothing_held(services)
    services.close()
