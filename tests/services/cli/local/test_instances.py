"""The published addresses of running `quire serve`s, which commands find."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from quire.v1 import kvmanager_pb2_grpc
from services.cli.local import instances
from services.cli.local.instances import Instance, NoSuchInstance, find, published, reachable, running
from services.cli.main import cli
from services.runtime import transport

# Publishes an instance until its input ends.
PUBLISHER = """
import sys
from services.cli.local.instances import Instance, published
with published(Instance(sys.argv[1], "unix:/g", "unix:/k", ["unix:/e"])):
    print("published", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(instances.FOLDER_VARIABLE, str(tmp_path / "runtime"))
    return tmp_path / "runtime"


def instance(name: str, ready_at: float = 1.0, gateway: str = "unix:/no/gateway.sock") -> Instance:
    return Instance(name, gateway, f"unix:/no/{name}.sock", [], ready_at=ready_at)


def invoke(*command: str) -> Result:
    return CliRunner().invoke(cli, command, prog_name="quire")


def begin(name: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "published\n"
    return process


def test_the_newest_or_the_named_instance_is_found(folder: Path) -> None:
    assert find() is None
    with published(instance("old", 1.0)), published(instance("new", 2.0)):
        assert [one.name for one in running()] == ["new", "old"]
        assert find() == instance("new", 2.0)
        assert find("old") == instance("old", 1.0)
        with pytest.raises(
            NoSuchInstance, match="--instance: no `quire serve` named other is running; running: new, old"
        ):
            find("other")
        with pytest.raises(NoSuchInstance, match="named old is already running"), published(instance("old")):
            pass
    assert running() == []
    assert list(folder.iterdir()) == []


def test_the_file_of_a_killed_process_is_removed(folder: Path) -> None:
    killed, living = begin("killed"), begin("living")
    assert {one.name for one in running()} == {"killed", "living"}
    killed.kill()
    killed.communicate()
    assert [one.name for one in running()] == ["living"]
    assert len(list(folder.iterdir())) == 1
    with published(instance("killed")):  # the name is free again
        assert len(running()) == 2
    living.communicate()
    assert running() == []


def test_a_folder_that_other_users_can_write_is_not_used(folder: Path) -> None:
    with published(instance("one")):
        folder.chmod(0o777)
        assert running() == []
        with pytest.raises(PermissionError, match="others may write into it"), published(instance("two")):
            pass
        folder.chmod(0o700)
        assert [one.name for one in running()] == ["one"]


def test_files_of_another_version_are_not_changed(folder: Path) -> None:
    with published(instance("one")):
        for path in folder.iterdir():
            path.write_text('{"version": 2}')
        assert running() == []
        assert len(list(folder.iterdir())) == 1


def test_a_wildcard_address_is_called_on_loopback() -> None:
    addresses = ("0.0.0.0:1", "[::]:1", "127.0.0.1:1", "unix:/x", "10.0.0.7:1")
    assert [reachable(one) for one in addresses] == ["127.0.0.1:1", "[::1]:1", "127.0.0.1:1", "unix:/x", "10.0.0.7:1"]


@pytest.mark.parametrize(
    ("command", "called"),
    [
        (("explain", "r1"), "unix:/no/new.sock"),
        (("explain", "r1", "--instance", "old"), "unix:/no/old.sock"),
        (("explain", "r1", "--address", "unix:/no/other.sock"), "unix:/no/other.sock"),
        (("generate", "fox"), "unix:/no/gateway.sock"),
        (("pins",), "unix:/no/gateway.sock"),
        (("health",), "unix:/no/gateway.sock"),
        (("bench", "serve"), "unix:/no/gateway.sock"),
    ],
)
def test_commands_call_the_newest_instance_by_default(command: tuple[str, ...], called: str) -> None:
    with published(instance("old", 1.0)), published(instance("new", 2.0)):
        done = invoke(*command)
    assert done.exit_code == 1
    assert called in done.output


@pytest.mark.parametrize(
    ("command", "address"), [(("explain", "r1"), "127.0.0.1:50053"), (("health",), "127.0.0.1:50051")]
)
def test_without_an_instance_commands_call_the_default_addresses(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], address: str
) -> None:
    called, channel = list[str](), transport.channel

    def without_a_listener(address: str, **options: Any) -> grpc.aio.Channel:
        """Connect elsewhere, because other processes may listen at the default addresses."""
        called.append(address)
        return channel("unix:/no/default.sock", **options)

    monkeypatch.setattr(transport, "channel", without_a_listener)
    done = invoke(*command)
    assert (done.exit_code, called) == (1, [address])
    assert address in done.output


class NoRequests(kvmanager_pb2_grpc.KVManagerServicer):
    def Explain(self, request: Any, context: grpc.ServicerContext) -> None:  # noqa: N802
        context.abort(grpc.StatusCode.NOT_FOUND, f"no request {request.request_id}")


@pytest.mark.parametrize(
    ("others", "options", "note"),
    [
        ((), (), "; this is the `quire serve` mine"),
        (("a", "b"), (), "; this is the `quire serve` mine, the newest; others run: b, a (--instance)"),
        (("a",), ("--instance", "mine"), ""),
    ],
)
def test_explain_of_an_unknown_request_names_the_instance_that_it_asked(
    others: tuple[str, ...], options: tuple[str, ...], note: str, tmp_path: Path
) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    kvmanager_pb2_grpc.add_KVManagerServicer_to_server(NoRequests(), server)
    address = f"unix:{tmp_path}/k.sock"
    server.add_insecure_port(address)
    server.start()
    with ExitStack() as running_ones:
        for ready_at, name in enumerate(others):
            running_ones.enter_context(published(instance(name, float(ready_at))))
        running_ones.enter_context(published(Instance("mine", "unix:/no/g.sock", address, [], ready_at=9.0)))
        done = invoke("explain", "r1", *options)
    server.stop(None).wait()
    assert (done.exit_code, done.output) == (1, f"{address}: NOT_FOUND: no request r1{note}\n")


def test_a_missing_instance_is_refused_by_its_name() -> None:
    done = invoke("pins", "--instance", "mine")
    assert (done.exit_code, "no `quire serve` named mine is running" in done.output) == (2, True)


def test_instances_lists_running_instances() -> None:
    assert "no `quire serve` of this user" in invoke("instances").output
    with published(instance("one")):
        (line,) = invoke("instances").output.splitlines()
    assert line == (
        f"one: process {os.getpid()}, gateway at unix:/no/gateway.sock, 0 engines, KV manager at unix:/no/one.sock"
    )
