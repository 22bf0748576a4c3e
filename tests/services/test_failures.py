"""A service that cannot start, or that dies: one line says which and why, and the exit status tells it too."""

import fcntl
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.running_quire import START_SECONDS, RunningQuire, launch, start_quires


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
def test_a_service_whose_address_is_taken_says_so(tiny_model: Callable[[str], Path], taken: str, label: str) -> None:
    arguments = ("--model", str(tiny_model("llama"))) if label == "gateway" else ()
    assert fail(label, "--listen", taken, *arguments) == (
        f"{label} cannot go on: AddressUnavailable: cannot listen on {taken}: Address already in use"
    )


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nonsense", "it is neither host:port nor unix:/path"),
        ("unix:/no/such/folder/x.sock", "No such file or directory"),
        ("256.0.0.1:0", "Name or service not known"),
    ],
)
def test_a_service_says_why_an_address_is_impossible(address: str, reason: str) -> None:
    assert fail("kvmanager", "--listen", address) == (
        f"kvmanager cannot go on: AddressUnavailable: cannot listen on {address}: {reason}"
    )


@pytest.mark.parametrize("label", ["engine", "gateway"])
def test_a_service_without_its_model_names_it(tmp_path: Path, label: str) -> None:
    last = fail(label, *some_listen(tmp_path), "--model", "/no/model")
    assert last.startswith(f"{label} cannot go on: ModelUnavailable: /no/model is no model: ")


def test_a_gateway_whose_model_folder_has_no_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    last = fail("gateway", *some_listen(tmp_path), "--model", str(tmp_path))
    assert last.startswith(f"gateway cannot go on: TokenizerLoadError: No tokenizer can be read from {tmp_path}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_engine_that_cannot_start_says_why(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Both start together, because importing torch takes its time."""
    model = ("--model", str(tiny_model("llama")))
    without_gpu = launch("engine", "--listen", f"unix:{tmp_path}/a.sock", *model, "--device", "cuda")
    too_small = launch(
        *("engine", "--listen", f"unix:{tmp_path}/b.sock", *model, "--cache-mib", "1", "--block-size", "4096")
    )
    status, lines = end_of(without_gpu)
    assert (status, lines[-1]) == (
        1,
        "engine cannot go on: InvalidSetting: device is 'cuda', but torch finds no GPU",
    )
    status, lines = end_of(too_small)
    assert (status, lines[-1]) == (
        1,
        "engine cannot go on: InvalidSetting: cache_mib is 1, but one block takes 3.0 MiB",
    )


# Under one command


def test_serve_names_a_service_that_could_not_start_and_stops_the_others(
    tiny_model: Callable[[str], Path], taken: str
) -> None:
    status, lines = end_of(launch("serve", "--listen", taken, "--model", str(tiny_model("llama"))))
    assert status == 1
    assert lines[-1] == (
        "serve     | gateway ended with status 1: gateway cannot go on: AddressUnavailable: "
        f"cannot listen on {taken}: Address already in use"
    )
    assert_folder_is_gone(lines)


def test_serve_without_its_model_names_it_and_starts_nothing() -> None:
    status, lines = end_of(launch("serve", "--model", "/no/model"))
    assert status == 1
    assert [line.startswith("serve     | /no/model is no model: ") for line in lines] == [True]


@pytest.fixture(scope="module")
def quires(tiny_model: Callable[[str], Path]) -> Iterator[dict[str, RunningQuire]]:
    """A Quire for each service to kill, started together because that takes less time."""
    labels = ("kvmanager", "engine", "gateway")
    started = start_quires(*[("--model", str(tiny_model("llama")), "--device-blocks", "16")] * len(labels))
    yield dict(zip(labels, started, strict=True))
    for one in started:
        one.close()


@pytest.mark.parametrize("label", ["kvmanager", "engine", "gateway"])
def test_serve_ends_when_a_service_is_killed_and_names_it(quires: dict[str, RunningQuire], label: str) -> None:
    quire = quires[label]
    services = quire.children()
    os.kill(services[label], signal.SIGKILL)
    assert quire.ended() == 1
    assert quire.lines[-1] == f"serve     | {label} was ended by SIGKILL"
    assert [name for name, pid in services.items() if Path(f"/proc/{pid}").exists()] == []
    assert_folder_is_gone(quire.lines)
    assert not [line for line in quire.lines if "Traceback" in line]


def assert_folder_is_gone(lines: list[str]) -> None:
    place = next(line for line in lines if "kvmanager listens on unix:" in line).split("unix:")[1]
    assert not Path(place).parent.exists()


# Signals before a service has begun


def test_a_model_that_is_being_fetched_does_not_hold_up_a_signal(tmp_path: Path) -> None:
    """Somebody else holds the lock of the demo model's folder, so the command waits for it."""
    (tmp_path / "models").mkdir()
    with (tmp_path / "models" / "SmolLM2-135M-Instruct-Q4_1.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command, status in (("serve", 0), ("engine", 0), ("gateway", 0), ("demo", 130)):
            for number in (signal.SIGTERM, signal.SIGINT):
                process = launch(command, QUIRE_CACHE=str(tmp_path))
                assert process.stdout is not None
                assert "waiting for the process" in process.stdout.readline()
                process.send_signal(number)
                assert end_of(process)[0] == status
