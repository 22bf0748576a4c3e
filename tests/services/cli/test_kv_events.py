"""`quire kv-events` and `quire key curve`: at the sockets of an engine without the engine, and at `quire serve`."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        "Error: no snapshot from 127.0.0.1:1 within 0.2 s: does the engine ask for keys?\n",
    )


def change_some(one: Published) -> None:
    one.stream.publish([stored(0, 4)])
    state: list[list[KeyChange]] = [[Cleared()], [stored(0, 4)]]
    one.stream.snapshot = lambda: (part for part in state)


@contextmanager
def following(one: Published, *options: str) -> Iterator[Iterator[str]]:
    """The lines of the command, until the block ends."""
    command = [sys.executable, "-m", "services.cli.main", "kv-events", *addresses(one), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.terminate()


def test_following_shows_counts_when_they_change() -> None:
    with publishing(change_some) as one, following(one, "--interval", "0.05") as lines:
        shown = next(line for line in lines if "no blocks" not in line)
        assert shown == "tiny at engine-1: GPU 4\n"


def test_each_event_is_printed_without_its_tokens() -> None:
    with publishing(change_some, kv_events_history=64) as one, following(one, "--print") as lines:
        first = [next(lines).split(" ", 1)[1] for _ in range(2)]
    assert first[0] == "cleared\n"
    hashes = " ".join(f"{wire_hash(key(number)):016x}" for number in range(3))
    assert first[1] == f"stored kind 0 GPU, blocks 4: {hashes} ...\n"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("127.0.0.1:1", "--once"), "--once needs --replay"),
        (("nowhere",), "ADDRESS must be host:port"),
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
        line = quire.output.wait_for("publishes KV events at ")
        said, protection = line.split("publishes KV events at ")[1].split("; ")
        assert protection == "they have the token ids of prompts, in plain text, for whoever connects"
        address, replay = said.split(", replays them at ")
        done = run(address, REPLAY, replay, "--once")
        assert done.exit_code == 0, done.output
        assert done.output.startswith("tiny-llama at ")
        shown = Scrape.of(quire.metrics_urls["engine"])
        assert shown.value("quire_kv_events_replay_requests_total", outcome="snapshot") == 1
        assert shown.value("quire_kv_events_batches_total") >= 1
        assert shown.values("quire_kv_events_connections", "socket").keys() == {"events", "replay"}
    finally:
        assert quire.close() == 0
