"""A service that cannot start, or that dies: one line names it and the reason, and the exit status is 1."""

import fcntl
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from services.engine.settings import EngineSettings
from services.engine.startup.assembly import assemble
from services.runtime.settings import InvalidSetting
from tests.running_quire import (
    START_SECONDS,
    Output,
    children_of,
    launch,
)
from tests.tiny_models import usual_size


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def end_of(process: "subprocess.Popen[str]") -> tuple[int, list[str]]:
    """Wait for the end; return the exit status and the lines."""
    output, _ = process.communicate(timeout=START_SECONDS)
    return process.returncode, output.splitlines()


def fail(*arguments: str) -> str:
    """Run a service that cannot start, and return its last line."""
    status, lines = end_of(launch(*arguments))
    assert status == 1
    assert not [line for line in lines if "Traceback" in line]
    return lines[-1]


def some_listen(folder: Path) -> tuple[str, str]:
    return ("--listen", f"unix:{folder}/service.sock")


@pytest.mark.parametrize("label", ["kvmanager", "gateway"])
def test_an_address_in_use_is_refused(taken: str, label: str) -> None:
    assert fail(label, "--listen", taken) == (
        f"{label} failed: AddressUnavailable: cannot listen on {taken}: Address already in use"
    )


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nonsense", "the address must be host:port or unix:/path"),
        ("unix:/no/such/folder/x.sock", "No such file or directory"),
        ("256.0.0.1:0", "Name or service not known"),
        ("127.0.0.1:70000", "the port must be between 0 and 65535, not 70000"),
    ],
)
def test_an_impossible_address_is_refused_with_the_reason(address: str, reason: str) -> None:
    assert fail("kvmanager", "--listen", address) == (
        f"kvmanager failed: AddressUnavailable: cannot listen on {address}: {reason}"
    )


def test_an_engine_without_its_model_is_refused_with_the_models_name(tmp_path: Path) -> None:
    last = fail("engine", *some_listen(tmp_path), "--model", "/no/model")
    assert last.startswith("engine failed: ModelUnavailable: /no/model is not a model: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_engine_without_its_gpu_does_not_start(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    last = fail("engine", *some_listen(tmp_path), "--model", str(tiny_model("llama")), "--device", "cuda")
    assert last == "engine failed: InvalidSetting: device is 'cuda', but torch found no GPU"


@usual_size
def test_a_cache_too_small_for_one_block_is_refused_naming_both_sizes(tiny_model: Callable[[str], Path]) -> None:
    """In process: another engine that starts only to end would take seconds."""
    settings = EngineSettings(model=str(tiny_model("llama")), dtype="float32", cache_mib=1, block_size=4096)
    with pytest.raises(InvalidSetting, match=r"cache_mib is 1, but one block takes 3\.0 MiB"):
        assemble(settings)


# Under one command


def test_serve_names_a_service_that_could_not_start_and_stops_the_others(
    tiny_model: Callable[[str], Path], taken: str
) -> None:
    status, lines = end_of(launch("serve", "--listen", taken, "--model", str(tiny_model("llama"))))
    assert status == 1
    assert lines[-1] == (
        "serve     | gateway ended with status 1: gateway failed: AddressUnavailable: "
        f"cannot listen on {taken}: Address already in use"
    )
    assert_folder_is_gone(lines)


def test_serve_without_its_model_names_it_and_starts_nothing() -> None:
    status, lines = end_of(launch("serve", "--model", "/no/model"))
    assert status == 1
    assert [line.startswith("serve     | /no/model is not a model: ") for line in lines] == [True]


@pytest.mark.parametrize("label", ["kvmanager", "gateway"])
def test_serve_ends_when_a_service_is_killed_while_the_others_still_start(
    tiny_model: Callable[[str], Path], tmp_path: Path, label: str
) -> None:
    process = launch("serve", *some_listen(tmp_path), "--model", str(tiny_model("llama")))
    output = Output(process)
    output.wait_for("kvmanager listens on")
    output.wait_for(f"{label} listens on")
    services = children_of(process.pid)
    os.kill(services[label], signal.SIGKILL)
    assert process.wait(START_SECONDS) == 1
    output.finish()
    assert output.lines[-1] == f"serve     | {label} was ended by SIGKILL"
    assert_nothing_is_left(output.lines, services)


def assert_nothing_is_left(lines: list[str], services: dict[str, int]) -> None:
    assert sorted(services) == ["engine", "gateway", "kvmanager"]
    assert [name for name, pid in services.items() if Path(f"/proc/{pid}").exists()] == []
    assert_folder_is_gone(lines)
    assert not [line for line in lines if "Traceback" in line]


def assert_folder_is_gone(lines: list[str]) -> None:
    """The KV manager reports its name, unless it was stopped before."""
    places = [line.split("unix:")[1] for line in lines if "kvmanager listens on unix:" in line]
    assert [place for place in places if Path(place).parent.exists()] == []


# Signals before a service has begun


def test_a_signal_ends_a_service_that_fetches_a_model(tmp_path: Path) -> None:
    """Somebody else holds the lock of the demo model's folder, so the command waits for it."""
    (tmp_path / "models").mkdir()
    with (tmp_path / "models" / "SmolLM2-135M-Instruct-Q4_1.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cases = [("serve", signal.SIGTERM, 0), ("serve", signal.SIGINT, 0), ("engine", signal.SIGTERM, 0)]
        cases += [("demo", signal.SIGTERM, 130), ("demo", signal.SIGINT, 130)]
        processes = [launch(command, QUIRE_CACHE=str(tmp_path)) for command, _, _ in cases]
        for process, (_, number, status) in zip(processes, cases, strict=True):
            assert process.stdout is not None
            assert "waiting for the process" in process.stdout.readline()
            process.send_signal(number)
            assert end_of(process)[0] == status


def test_a_service_that_cannot_export_its_metrics_does_not_start(taken: str, tmp_path: Path) -> None:
    for address, reason in (
        (taken, "Address already in use"),
        ("nonsense", "the address must be host:port"),
        ("127.0.0.1:70000", "the port must be between 0 and 65535, not 70000"),
        ("256.0.0.1:0", "Name or service not known"),
        ("127.0.0.1:70000", "the port must be between 0 and 65535, not 70000"),
    ):
        assert fail("kvmanager", *some_listen(tmp_path), "--metrics-listen", address) == (
            f"kvmanager failed: AddressUnavailable: cannot show metrics on {address}: {reason}"
        )


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:65534", ":9151", "127.0.0.1:"])
def test_quire_serve_needs_three_ports_for_its_metrics(address: str) -> None:
    status, lines = end_of(launch("serve", "--metrics-listen", address))
    assert status == 2
    assert lines[-1] == (f"Error: metrics_listen is {address!r}, it must be host:port with 2 more ports behind it")
