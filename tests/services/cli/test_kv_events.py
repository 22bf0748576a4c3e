"""`quire kv-events` and `quire key curve`: at the sockets of an engine without the engine, and at `quire serve`."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from services.cli.main import cli
from services.engine.events.changes import Cleared, KeyChange
from services.engine.events.zeromq.vllm_format import wire_hash
from tests.key_changes import key, stored
from tests.running_quire import CALL_SECONDS, start_quire
from tests.scrape import Scrape
from tests.services.engine.events.publication import Published, published

REPLAY = "--replay"


@contextmanager
def publishing(change: Callable[[Published], None], **settings: Any) -> Iterator[Published]:
    """Publish on another thread; `change` runs there first."""
    ready: list[Published] = []
    begun, end = threading.Event(), threading.Event()

    async def publish() -> None:
        async with published(**settings) as one:
            change(one)
            ready.append(one)
            begun.set()
            while not end.is_set():
                one.stream.publish([])
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=asyncio.run, args=(publish(),))
    thread.start()
    assert begun.wait(CALL_SECONDS)
    try:
        yield ready[0]
    finally:
        end.set()
        thread.join()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["kv-events", *arguments])


def addresses(one: Published) -> tuple[str, str, str]:
    return one.publisher.address, REPLAY, one.publisher.replay_address


def test_once_prints_the_blocks_of_a_snapshot() -> None:
    with publishing(lambda one: one.keys.grow(7)) as one:
        done = run(*addresses(one), "--once")
    assert (done.exit_code, done.output) == (0, "tiny at engine-1: GPU 7\n")


def test_once_without_an_engine_ends_at_its_deadline() -> None:
    done = run("127.0.0.1:1", REPLAY, "127.0.0.1:1", "--once", "--timeout", "0.2")
    assert (done.exit_code, done.output) == (
        1,
        "Error: no snapshot from 127.0.0.1:1 within 0.2 s: "
        "is it the engine's --kv-events-replay-listen, and does the engine ask for keys?\n",
    )


def test_once_with_a_wrong_address_of_replays_names_it() -> None:
    with publishing(lambda one: one.keys.grow(7)) as one:
        done = run(one.publisher.address, REPLAY, one.publisher.address, "--once", "--timeout", "3")
    assert done.exit_code == 1
    assert done.output.startswith(
        f"Error: no snapshot from {one.publisher.address} within 3 s: is it the engine's --kv-events-replay-listen, "
    )


def change_some(one: Published) -> None:
    one.stream.publish([stored(0, 4)])
    state: list[list[KeyChange]] = [[Cleared()], [stored(0, 4)]]
    one.stream.snapshot = lambda: (part for part in state)


@contextmanager
def following(*arguments: str, stderr: int | None = None) -> Iterator[Iterator[str]]:
    """The lines of the command, until the block ends."""
    command = [sys.executable, "-m", "services.cli.main", "kv-events", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.terminate()


def test_following_shows_counts_when_they_change() -> None:
    with publishing(change_some) as one, following(*addresses(one), "--interval", "0.05") as lines:
        shown = next(line for line in lines if "GPU" in line)
        assert shown == "tiny at engine-1: GPU 4\n"


@pytest.mark.parametrize("options", [[], ["--print"]])
def test_an_engine_that_is_away_is_not_taken_for_an_empty_one(options: list[str]) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with following(address, "--interval", "0.05", *options, stderr=subprocess.STDOUT) as lines:
            assert next(lines) == f"not connected to {address}\n"


def test_the_loss_of_the_connection_is_shown_beside_what_is_known() -> None:
    with ExitStack() as running:
        with publishing(change_some) as one:
            lines = running.enter_context(following(*addresses(one), "--interval", "0.05"))
            assert any(line == "tiny at engine-1: GPU 4\n" for line in lines)
        expected = f"tiny at engine-1: GPU 4 (not connected to {one.publisher.address})\n"
        assert any(line == expected for line in lines)


def test_an_engine_that_says_nothing_is_not_taken_for_an_empty_one() -> None:
    with (
        publishing(lambda _: None) as one,
        following(one.publisher.address, "--topic", "another", "--interval", "0.05") as lines,
    ):
        expected = f"connected to {one.publisher.address}, nothing received yet\n"
        assert any(line == expected for line in lines)


def test_a_host_that_has_no_address_is_an_error() -> None:
    done = run("nosuch.invalid:1")
    assert done.exit_code == 1
    assert done.output.startswith("Error: cannot find the host of nosuch.invalid:1: ")


def test_each_event_is_printed_without_its_tokens() -> None:
    with publishing(change_some, kv_events_history=64) as one, following(*addresses(one), "--print") as lines:
        first = [next(lines).split(" ", 1)[1] for _ in range(2)]
    assert first[0] == "cleared\n"
    hashes = " ".join(f"{wire_hash(key(number)):016x}" for number in range(3))
    assert first[1] == f"stored kind 0 GPU, blocks 4: {hashes} ...\n"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("127.0.0.1:1", "--once"), "--once needs --replay"),
        (("nowhere",), "ADDRESS must be host:port, not 'nowhere'"),
        (("unix:/x",), "ADDRESS must be host:port, not 'unix:/x'"),
        (("dns:///localhost:1",), "ADDRESS must be host:port, not 'dns:///localhost:1'"),
        (("127.0.0.1:1", REPLAY, "unix:/x"), "--replay must be host:port, not 'unix:/x'"),
        (("127.0.0.1:1", REPLAY, "127.0.0.1:0"), "--replay: the port must be between 1 and 65535"),
        (("127.0.0.1:1", "--curve-key", __file__), "give --curve-key and --curve-server together"),
        (
            ("127.0.0.1:1", "--curve-key", __file__, "--curve-server", __file__),
            "--curve-key must have keys of 40 characters in Z85: line 1 of",
        ),
    ],
)
def test_unusable_options_are_refused_by_name(arguments: tuple[str, ...], fault: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert fault in done.output


def test_keys_made_by_the_command_encrypt(tmp_path: Path) -> None:
    server, client = tmp_path / "server", tmp_path / "client"
    public = {}
    for file in (server, client):
        made = CliRunner().invoke(cli, ["key", "curve", str(file)])
        public[file] = tmp_path / f"{file.name}.public"
        public[file].write_text(made.stdout)
        assert file.stat().st_mode & 0o777 == 0o600
    shown = CliRunner().invoke(cli, ["key", "curve", str(server), "--show"])
    assert shown.output.strip() == public[server].read_text().strip()
    again = CliRunner().invoke(cli, ["key", "curve", str(server)])
    assert (again.exit_code, again.output) == (1, f"Error: cannot write '{server}': File exists\n")
    files = {"kv_events_curve_key": str(server), "kv_events_curve_clients": str(public[client])}
    with publishing(lambda one: one.keys.grow(3), **files) as one:
        keys = ("--curve-key", str(client), "--curve-server", str(public[server]))
        assert run(*addresses(one), "--once", *keys).output == "tiny at engine-1: GPU 3\n"
        assert run(*addresses(one), "--once", "--timeout", "0.5").exit_code == 1


def test_an_engine_of_quire_serve_publishes(tiny_model: Callable[[str], Path]) -> None:
    model = str(tiny_model("llama"))
    events = ("--kv-events-listen", "127.0.0.1:0", "--kv-events-replay-listen", "127.0.0.1:0")
    quire = start_quire("--model", model, "--device-blocks", "64", *events, "--heartbeat-seconds", "0.2")
    try:
        line = quire.output.wait_for("KV events are published at ")
        said, protection = line.split("KV events are published at ")[1].split("; ")
        assert protection == "they contain the token ids of prompts, in plain text, for whoever connects"
        address, replay = said.split(" and replayed at ")
        done = run(address, REPLAY, replay, "--once")
        assert done.exit_code == 0, done.output
        assert done.output.startswith("tiny-llama at ")
        shown = Scrape.of(quire.metrics_urls["engine"])
        assert shown.value("quire_kv_events_replay_requests_total", outcome="snapshot") == 1
        assert shown.value("quire_kv_events_batches_total") >= 1
        assert shown.values("quire_kv_events_connections", "socket").keys() == {"events", "replay"}
    finally:
        assert quire.close() == 0
