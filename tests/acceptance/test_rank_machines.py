"""Ranks on two machines, started by torchrun: their tokens, and their end when one of them ends or is cut off."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from quire.v1 import gateway_pb2_grpc
from tests.faults import Streams, prompts
from tests.running.machines import Machine, Ranks, available, two_machines
from tests.running_quire import RunningService

RANK_SECONDS = 3.0
# torchrun ends its other processes, and waits for the other machines' torchrun.
SECONDS_TO_END = RANK_SECONDS + 60

pytestmark = pytest.mark.skipif(not available(), reason="network namespaces require root and iproute2")


class Services:
    """A KV manager, an engine of ranks on two machines, and a gateway."""

    def __init__(self, folder: Path, machines: tuple[Machine, Machine], models: tuple[Path, Path]) -> None:
        self.manager = RunningService("kvmanager", "--listen", f"unix:{folder}/kvmanager.sock", "--lease-seconds", "2")
        address = f"unix:{folder}/engine.sock"
        self.ranks = [
            machine.torchrun(
                machines[0].address,
                len(machines),
                *("engine", "--listen", address, "--kvmanager", self.manager.address, "--model", str(model)),
                *("--tensor-parallel", "2", "--rank-seconds", str(RANK_SECONDS), "--device-blocks", "256"),
                *("--device", "cpu", "--attention-backend", "torch", "--heartbeat-seconds", "0.2"),
            )
            for machine, model in zip(machines, models, strict=True)
        ]
        self._folder = folder
        self._address = address
        self._gateway: RunningService | None = None

    @property
    def stub(self) -> gateway_pb2_grpc.GatewayStub:
        if self._gateway is None:
            self.ranks[0].output.wait_for("engine is ready")
            self._gateway = RunningService(
                "gateway", "--listen", f"unix:{self._folder}/gateway.sock", "--engines", self._address
            )
            self._gateway.output.wait_for("gateway is ready")
        return gateway_pb2_grpc.GatewayStub(self._gateway.channel)

    def close(self) -> None:
        for ranks in self.ranks:
            ranks.close()
        if self._gateway:
            self._gateway.close()
        self.manager.close()


Start = Callable[..., Services]


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as machines:
        yield machines


@pytest.fixture
def start(tmp_path: Path, machines: tuple[Machine, Machine], model: Path) -> Iterator[Start]:
    started: list[Services] = []

    def start(second: Path = model) -> Services:
        started.append(Services(tmp_path, machines, (model, second)))
        return started[-1]

    yield start
    for services in started:
        services.close()


def rank_of(ranks: Ranks) -> psutil.Process:
    """Return the process that torchrun has started."""
    (rank,) = psutil.Process(ranks.process.pid).children()
    return rank


def test_two_machines_compute_the_tokens_of_one_process(start: Start, model: Path, tmp_path: Path) -> None:
    services = start()
    requests = prompts(6, 20)
    tokens = Streams(services.stub, requests).tokens()
    (tmp_path / "one").mkdir()
    alone = RunningService(
        *("engine", "--listen", f"unix:{tmp_path}/one/engine.sock", "--kvmanager", services.manager.address),
        *("--model", str(model), "--device", "cpu", "--attention-backend", "torch", "--device-blocks", "256"),
    )
    gateway = RunningService("gateway", "--listen", f"unix:{tmp_path}/one/gateway.sock", "--engines", alone.address)
    gateway.output.wait_for("gateway is ready")
    assert tokens == Streams(gateway_pb2_grpc.GatewayStub(gateway.channel), requests).tokens()
    assert [gateway.close(), alone.close()] == [0, 0]


def test_a_stopped_machine_ends_the_engine_after_its_requests(start: Start) -> None:
    services = start()
    running = Streams(services.stub, prompts(2, 200))
    running.wait_for_tokens(10)
    for ranks in services.ranks:
        ranks.process.terminate()
    assert running.codes() == {}
    for ranks in services.ranks:
        ranks.ended()


@pytest.mark.parametrize("number", [0, 1])
def test_all_machines_end_with_a_killed_rank(start: Start, number: int) -> None:
    services = start()
    Streams(services.stub, prompts(4, 1500)).wait_for_tokens(20)
    begun = time.monotonic()
    rank_of(services.ranks[number]).send_signal(signal.SIGKILL)
    for ranks in services.ranks:
        ranks.ended(SECONDS_TO_END)
    assert time.monotonic() - begun < SECONDS_TO_END
    if number == 1:
        services.ranks[0].output.wait_for("engine failed: rank 1 ended its link")


def test_all_machines_end_when_the_network_does(start: Start, machines: tuple[Machine, Machine]) -> None:
    services = start()
    Streams(services.stub, prompts(4, 1500)).wait_for_tokens(20)
    ranks = [rank_of(one) for one in services.ranks]
    machines[1].disconnect()
    _, alive = psutil.wait_procs(ranks, RANK_SECONDS + 15)
    assert alive == []
    services.ranks[0].output.wait_for(f"engine failed: rank 1 has not responded for {RANK_SECONDS:g} s")


def test_another_model_on_a_machine_is_refused(start: Start, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_model("llama").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    configuration = other / "config.json"
    configuration.write_text(configuration.read_text().replace("{", "{ ", 1))
    services = start(other)
    services.ranks[0].output.wait_for("engine failed: rank 1 has another model than rank 0")
    for ranks in services.ranks:
        ranks.ended(SECONDS_TO_END)
