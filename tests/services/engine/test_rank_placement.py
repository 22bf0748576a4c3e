"""Ranks on several machines: torchrun's environment, and who may connect to rank 0."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.errors import RankFailed
from services.engine.ranks import worker_process
from services.engine.ranks.link import Kind
from services.engine.ranks.meeting import accept_ranks, connect
from services.engine.ranks.placement import LOOPBACK, Placement, placement
from services.engine.ranks.rank_group import RankGroup
from services.engine.ranks.worker_process import run_rank
from services.engine.settings import EngineSettings
from services.runtime.settings import InvalidSetting

TORCHRUN = {
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "machine-0",
    "MASTER_PORT": "29500",
}
SETTINGS = EngineSettings(tensor_parallel=2)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


@pytest.fixture
def client(store: TCPStore) -> TCPStore:
    """Another rank's connection to the store."""
    return TCPStore(LOOPBACK, store.port, is_master=False, timeout=timedelta(seconds=10))


def test_torchrun_places_a_rank() -> None:
    assert placement(4, TORCHRUN) == Placement(3, 1, 2, "machine-0", 29500)


def test_one_rank_a_machine_needs_no_local_rank() -> None:
    given = {name: value for name, value in TORCHRUN.items() if not name.startswith("LOCAL")}
    assert placement(4, given) == Placement(3, 0, 1, "machine-0", 29500)


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"RANK": "1", "WORLD_SIZE": ""}])
def test_without_torchrun_a_process_has_no_place(environment: dict[str, str]) -> None:
    assert placement(2, environment) is None


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("WORLD_SIZE", "2", "tensor_parallel is 4, but WORLD_SIZE is 2: they must be equal"),
        ("WORLD_SIZE", "many", "WORLD_SIZE must be a whole number of at least 1, not 'many'"),
        ("WORLD_SIZE", "0", "WORLD_SIZE must be a whole number of at least 1, not '0'"),
        ("RANK", "4", "RANK must be a whole number from 0 to 3, not '4'"),
        ("RANK", "-1", "RANK must be a whole number from 0 to 3, not '-1'"),
        ("RANK", "", "RANK must be given, because WORLD_SIZE is 4"),
        ("LOCAL_RANK", "2", "LOCAL_RANK must be a whole number from 0 to 1, not '2'"),
        ("LOCAL_WORLD_SIZE", "5", "LOCAL_WORLD_SIZE must be a whole number from 1 to 4, not '5'"),
        ("MASTER_ADDR", "", "MASTER_ADDR must be given, because WORLD_SIZE is 4"),
        ("MASTER_PORT", "65536", "MASTER_PORT must be a whole number from 1 to 65535, not '65536'"),
        ("MASTER_PORT", "²", "MASTER_PORT must be a whole number from 1 to 65535, not '²'"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(name: str, value: str, reason: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        placement(4, {**TORCHRUN, name: value})
    assert str(refused.value) == reason


def place(rank: int) -> Placement:
    return Placement(rank, 0, 1, LOOPBACK, 1)


def test_a_rank_receives_the_settings_of_rank_0(store: TCPStore, client: TCPStore) -> None:
    with ThreadPoolExecutor() as threads:
        accepted = threads.submit(accept_ranks, SETTINGS, place(0), store, 10)
        link = connect(place(1), client)
        start = link.receive()
        (rank,) = accepted.result()
    assert start is not None
    assert start.kind is Kind.START
    assert rank.rank == 1
    link.close()
    rank.link.close()


@pytest.mark.parametrize("same_version", [True, False])
def test_rank_0_receives_why_a_rank_cannot_start(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, same_version: bool
) -> None:
    for name, value in {**TORCHRUN, "RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", str(store.port))

    def with_folder(settings: EngineSettings) -> EngineSettings:
        if same_version:
            raise InvalidSetting("there is no model of this name")
        return settings

    if not same_version:
        monkeypatch.setattr(worker_process, "asdict", lambda settings: {})
    with ThreadPoolExecutor() as threads:
        accepted = threads.submit(accept_ranks, SETTINGS, place(0), store, 10)
        status = threads.submit(run_rank, SETTINGS, place(1), with_folder)
        group = RankGroup(accepted.result(), 10)
        reason = "there is no model of this name" if same_version else "rank 0 runs another version of Quire"
        with pytest.raises(RankFailed, match=f"^rank 1 failed: {reason}$"):
            group.wait_until_ready()
        group.close()
        assert status.result() == 1


@pytest.mark.parametrize(
    "said", [b"", b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", b"%s 2", b"%s 0", b"%s x"], ids=range(6)
)
def test_a_connection_of_somebody_else_is_closed(store: TCPStore, client: TCPStore, said: bytes) -> None:
    with ThreadPoolExecutor() as threads:
        accepted = threads.submit(accept_ranks, SETTINGS, place(0), store, 10)
        port, token = client.get("quire/plans").split()
        with socket.create_connection((LOOPBACK, int(port)), timeout=10) as other:
            other.sendall(said.replace(b"%s", token).ljust(64))
            assert other.recv(1) == b""
        link = connect(place(1), client)
        (rank,) = accepted.result()
    link.close()
    rank.link.close()


def test_a_rank_that_does_not_connect_is_named(store: TCPStore) -> None:
    with pytest.raises(RankFailed, match=r"^no connection from rank 1 within 0.1 s$"):
        accept_ranks(SETTINGS, place(0), store, 0.1)


def test_rank_0_must_be_at_its_address(store: TCPStore) -> None:
    with pytest.raises(RankFailed, match=r"^rank 0 cannot listen at MASTER_ADDR 192\.0\.2\.1: "):
        accept_ranks(SETTINGS, Placement(0, 0, 1, "192.0.2.1", 1), store, 0.1)
