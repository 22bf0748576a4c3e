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
from click.testing import CliRunner

from services.cli.local.supervisor import metrics_addresses
from services.cli.main import cli
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import assemble
from services.models.model_store import DEMO_FOLDER
from services.runtime.logs.records import message_of
from services.runtime.settings import InvalidSetting
from tests.running_quire import START_SECONDS, Output, children_of, launch
from tests.tiny_models import usual_size


@pytest.fixture
def taken() -> Iterator[str]:
    """An address with another listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def result(process: "subprocess.Popen[str]") -> tuple[int, list[str]]:
    """Wait for the end; return the exit status and the lines."""
    output, _ = process.communicate(timeout=START_SECONDS)
    return process.returncode, output.splitlines()


def last_line(*arguments: str) -> str:
    """Run a service that cannot start, and return its last line."""
    status, lines = result(launch(*arguments))
    assert status == 1
    assert not [line for line in lines if "Traceback" in line]
    return message_of(lines[-1])


def test_an_address_in_use_is_refused(taken: str) -> None:
    assert last_line("kvmanager", "--listen", taken) == (
        f"kvmanager failed: cannot listen on {taken}: Address already in use"
    )


def test_a_metrics_address_in_use_is_refused(taken: str, tmp_path: Path) -> None:
    arguments = ("--listen", f"unix:{tmp_path}/service.sock", "--metrics-listen", taken)
    assert last_line("kvmanager", *arguments) == (
        f"kvmanager failed: cannot show metrics on {taken}: Address already in use"
    )


def test_an_engine_without_its_model_is_refused_with_the_models_name(tmp_path: Path) -> None:
    last = last_line("engine", "--listen", f"unix:{tmp_path}/service.sock", "--model", "/no/model")
    assert last.startswith("engine failed: /no/model is not a model: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_engine_without_its_gpu_does_not_start(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidSetting, match="device is 'cuda', but torch found no GPU"):
        assemble(EngineSettings(model=str(tiny_model("llama")), device="cuda"))


@usual_size
def test_a_cache_too_small_for_one_block_is_refused_naming_both_sizes(tiny_model: Callable[[str], Path]) -> None:
    model = str(tiny_model("llama"))
    settings = EngineSettings(model=model, attention_backend="torch", cache_mib=1, block_size=4096)
    with pytest.raises(InvalidSetting, match=r"cache_mib is 1, but one block takes 3\.0 MiB"):
        assemble(settings)


# Under one command


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("--listen", "TAKEN", "listen: cannot listen on TAKEN: Address already in use"),
        ("--metrics-listen", "TAKEN", "metrics_listen: cannot listen on TAKEN: Address already in use"),
        (
            "--listen",
            "unix:/no/folder/x",
            "listen: cannot listen on unix:/no/folder/x: there is no folder '/no/folder'",
        ),
        ("--api-keys", "/no/file", "api_keys: cannot read '/no/file': "),
        ("--pinned-prompts", "/no/file", "pinned_prompts: cannot read '/no/file': "),
        ("--record-requests", "/tmp", "record_requests must be a file, not the folder '/tmp'"),
        ("--record-folder", "/dev/null", "record_folder must be a folder, not the file '/dev/null'"),
    ],
)
def test_serve_checks_files_and_addresses_before_it_starts_a_service(
    taken: str, option: str, value: str, fault: str
) -> None:
    serve = ("serve", "--listen", "127.0.0.1:0", option, value.replace("TAKEN", taken), "--model", "/no/model")
    status, lines = result(launch(*serve))
    assert (status, len(lines)) == (1, 1)
    assert lines[0].startswith("serve     | ERROR " + fault.replace("TAKEN", taken))


@usual_size
def test_serve_names_a_service_that_could_not_start_and_stops_the_others(
    tiny_model: Callable[[str], Path],
) -> None:
    model = ("--model", str(tiny_model("llama")), "--dtype", "float32")
    too_small = ("--cache-mib", "1", "--block-size", "4096")
    status, lines = result(launch("serve", "--listen", "127.0.0.1:0", *model, *too_small))
    assert status == 1
    assert lines[-1].startswith(
        "serve     | ERROR engine ended with status 1: engine failed: cache_mib is 1, but one block"
    )
    assert_folder_is_gone(lines)


def test_serve_without_its_model_names_it_and_starts_nothing() -> None:
    status, lines = result(launch("serve", "--model", "/no/model"))
    assert status == 1
    assert [line.startswith("serve     | ERROR /no/model is not a model: ") for line in lines] == [True]


def test_serve_ends_when_a_service_is_killed_while_the_others_still_start(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    process = launch("serve", "--listen", f"unix:{tmp_path}/service.sock", "--model", str(tiny_model("llama")))
    output = Output(process)
    output.wait_for("gateway listens on")
    services = children_of(process.pid)
    os.kill(services["gateway"], signal.SIGKILL)
    assert process.wait(START_SECONDS) == 1
    output.finish()
    assert output.lines[-1] == "serve     | ERROR gateway was ended by SIGKILL"
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
    """Each command waits for the lock of the demo model's folder."""
    (tmp_path / "models").mkdir()
    with (tmp_path / "models" / f"{DEMO_FOLDER}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cases = [("serve", signal.SIGINT, 0), ("engine", signal.SIGTERM, 0), ("demo", signal.SIGTERM, 130)]
        processes = [launch(command, QUIRE_CACHE=str(tmp_path)) for command, _, _ in cases]
        for process, (_, number, status) in zip(processes, cases, strict=True):
            assert process.stdout is not None
            assert "waiting for the process" in process.stdout.readline()
            process.send_signal(number)
            assert result(process)[0] == status


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:65534", ":9151", "127.0.0.1:"])
def test_three_services_need_three_ports_for_their_metrics(address: str) -> None:
    with pytest.raises(
        ValueError, match=f"metrics_listen must be host:port with 2 more ports after it, not '{address}'"
    ):
        metrics_addresses(address)


def test_serve_reports_bad_metrics_addresses() -> None:
    done = CliRunner().invoke(cli, ["serve", "--metrics-listen", "127.0.0.1:65534"])
    assert done.exit_code == 2
    assert "metrics_listen must be host:port with 2 more ports after it, not '127.0.0.1:65534'" in done.stderr
