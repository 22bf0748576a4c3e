"""The container of smg waits for all engines, because smg asks an engine for its model once."""

import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deploy.smg import start
from services.runtime.ports import ENGINE


class Ready(BaseHTTPRequestHandler):
    """Answers /ready with the status of its server."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a ready engine, which the script asks."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Ready)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(start, "METRICS_PORT", server.server_port)
    monkeypatch.setattr(start, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(Ready, "status", 200)
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def test_it_waits_until_as_many_engines_have_addresses_as_are_to_start(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([[], ["127.0.0.1"], ["127.0.0.1", "127.0.0.2"]])
    monkeypatch.setattr(start, "addresses", lambda: next(found))
    monkeypatch.setattr(start, "answers", lambda *_: True)
    assert start.ready_engines(2, time.monotonic() + 60) == ["127.0.0.1", "127.0.0.2"]


def test_it_waits_for_an_engine_that_loads_its_model(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def addresses() -> list[str]:
        nonlocal asked
        asked += 1
        monkeypatch.setattr(Ready, "status", 503 if asked < 3 else 200)
        return ["127.0.0.1"]

    monkeypatch.setattr(start, "addresses", addresses)
    assert start.ready_engines(1, time.monotonic() + 60) == ["127.0.0.1"]
    assert asked == 3


def test_it_gives_up_at_its_deadline(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "addresses", list)
    assert start.ready_engines(1, time.monotonic()) == []


def test_another_status_or_no_answer_is_not_ready(port: int) -> None:
    assert start.answers("127.0.0.1", port, "/ready")
    assert not start.answers("127.0.0.1", port, "/metrics")
    assert not start.answers("127.0.0.1", 1, "/ready")


def test_a_name_that_nobody_has_resolves_to_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "ENGINES", "no-such-host.invalid")
    assert start.addresses() == []
    monkeypatch.setattr(start, "ENGINES", "127.0.0.1")
    assert start.addresses() == ["127.0.0.1"]


def test_smg_gets_the_grpc_addresses_of_engines_and_its_options() -> None:
    command = start.command_of(["10.0.0.1", "10.0.0.2"], ["--policy", "cache_aware"])
    assert command[:2] == ["smg", "launch"]
    assert command[command.index("--worker-urls") + 1 :] == [
        f"grpc://10.0.0.1:{ENGINE.grpc}",
        f"grpc://10.0.0.2:{ENGINE.grpc}",
    ]
    assert command[command.index("--policy") + 1] == "cache_aware"
    assert command[command.index("--prometheus-host") + 1] == "127.0.0.1", "else all other containers read the metrics"
    assert ENGINE.grpc == start.GRPC_PORT
    assert ENGINE.metrics == start.METRICS_PORT


def test_the_check_fails_while_smg_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "PORT", 1)
    monkeypatch.setattr(sys, "argv", ["start-smg", "--check"])
    with pytest.raises(SystemExit) as end:
        start.main()
    assert end.value.code == 1
