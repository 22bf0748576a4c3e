"""An engine of two ranks as real processes: its tokens, and its end when a rank ends, stops or cannot start."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from quire.v1 import gateway_pb2_grpc
from tests.faults import Streams, prompts, wait_until
from tests.running.ranks import workers_of
from tests.running_quire import Output, RunningService, launch

RANK_SECONDS = 4.0
# The service stops in some seconds after it has noticed.
MAX_SECONDS_TO_END = RANK_SECONDS + 15


class Ranks:
    """A KV manager, an engine of some ranks, and a gateway."""

    def __init__(self, folder: Path, model: Path, size: int) -> None:
        self.manager = RunningService("kvmanager", "--listen", f"unix:{folder}/kvmanager.sock", "--lease-seconds", "2")
        self.engine = RunningService(
            "engine",
            *("--listen", f"unix:{folder}/engine.sock", "--kvmanager", self.manager.address, "--model", str(model)),
            *("--tensor-parallel", str(size), "--rank-seconds", str(RANK_SECONDS), "--device-blocks", "256"),
            *("--device", "cpu", "--attention-backend", "torch", "--heartbeat-seconds", "0.2"),
        )
        self.gateway = RunningService(
            "gateway", "--listen", f"unix:{folder}/gateway.sock", "--engines", self.engine.address
        )
        self.gateway.output.wait_for("gateway is ready")
        self.stub = gateway_pb2_grpc.GatewayStub(self.gateway.channel)

    def workers(self) -> list[int]:
        return workers_of(self.engine.process.pid)

    def close(self) -> None:
        for service in (self.gateway, self.engine, self.manager):
            service.close()


def runs(pid: int) -> bool:
    """Whether a process runs that is no child of this one."""
    with suppress(OSError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return False


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Callable[[int], Ranks]]:
    started: list[Ranks] = []

    def start(size: int) -> Ranks:
        folder = tmp_path / str(size)
        folder.mkdir()
        started.append(Ranks(folder, model, size))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


@pytest.fixture
def ranks(start: Callable[[int], Ranks]) -> Ranks:
    return start(2)


def test_two_processes_compute_the_tokens_of_one_until_the_engine_stops(start: Callable[[int], Ranks]) -> None:
    requests = prompts(6, 20)
    one, two = start(1), start(2)
    (worker,) = two.workers()
    assert Streams(one.stub, requests).tokens() == Streams(two.stub, requests).tokens()
    assert two.engine.close() == 0
    assert not runs(worker)


# Stopped ranks, and ranks on several machines, are acceptance tests.


def test_an_engine_ends_with_a_killed_rank(ranks: Ranks) -> None:
    (worker,) = ranks.workers()
    Streams(ranks.stub, prompts(4, 1500)).wait_for_tokens(20)
    begun = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    assert ranks.engine.ended() == 1
    assert time.monotonic() - begun < MAX_SECONDS_TO_END
    assert ranks.engine.output.lines[-1].endswith("engine failed: rank 1 ended by signal 9")
    assert not [line for line in ranks.engine.output.lines if "Traceback" in line]
    assert not runs(worker)


def test_the_ranks_end_with_a_killed_engine(ranks: Ranks) -> None:
    (worker,) = ranks.workers()
    Streams(ranks.stub, prompts(4, 1500)).wait_for_tokens(20)
    ranks.engine.kill()
    wait_until(lambda: not runs(worker), "the rank has ended", MAX_SECONDS_TO_END)


def test_a_rank_that_ends_during_the_start_is_named(tmp_path: Path, model: Path) -> None:
    engine = launch(
        *("engine", "--listen", f"unix:{tmp_path}/engine.sock", "--kvmanager", f"unix:{tmp_path}/none.sock"),
        *("--model", str(model), "--tensor-parallel", "2", "--device", "cpu"),
    )
    wait_until(lambda: bool(workers_of(engine.pid)), "the rank has started")
    os.kill(workers_of(engine.pid)[0], signal.SIGKILL)
    output, _ = engine.communicate(timeout=MAX_SECONDS_TO_END)
    assert engine.returncode == 1
    assert output.splitlines()[-1].endswith("engine failed: rank 1 ended by signal 9")


def test_an_engine_that_waits_for_other_machines_can_be_stopped(tmp_path: Path, model: Path) -> None:
    engine = launch(
        *("engine", "--listen", f"unix:{tmp_path}/engine.sock", "--kvmanager", f"unix:{tmp_path}/none.sock"),
        *("--model", str(model), "--tensor-parallel", "2", "--device", "cpu", "--attention-backend", "torch"),
        WORLD_SIZE="2",
        RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29731",
    )
    output = Output(engine)
    output.wait_for("rank 0 waits for the others at 127.0.0.1:29731")
    engine.terminate()
    assert engine.wait(MAX_SECONDS_TO_END) == 0
    output.finish()


def test_a_model_that_ranks_cannot_share_is_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    engine = launch(
        *("engine", "--listen", f"unix:{tmp_path}/engine.sock", "--model", str(tiny_model("gpt2"))),
        *("--tensor-parallel", "2"),
    )
    output, _ = engine.communicate(timeout=60)
    assert engine.returncode == 1
    assert "no tensor-parallel plan for models of type 'gpt2'" in output.splitlines()[-1]
