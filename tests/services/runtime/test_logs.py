"""The log: a line for each record, one for each request's end, and nobody waits for whoever should read it."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from quire.v1 import gateway_pb2, kvmanager_pb2
from services.models.stage_display import StageLog
from services.runtime.logs import LogWriter, TextFormatter, json_formatter, logging_to_stderr
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Output, RunningQuire, launch, start_quire
from tests.scrape import Scrape
from tests.timing import in_time

LINES = 20_000
# Tokens. The pool holds no more of one request.
LONG = 900
RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def record(message: str = "said", level: int = logging.INFO, **fields: Any) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "quire.x", "levelno": level, "levelname": "INFO", "msg": message, **fields})


class Pipe:
    """What a LogWriter writes to, and a way to read it."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()

    def lines(self) -> list[str]:
        """Close the writing end, and return what came, with what may still be waiting."""
        os.close(self.write)
        with os.fdopen(self._read, encoding="utf-8") as read:
            return read.read().splitlines()

    def abandon(self) -> list[str]:
        """Close the reading end, and return what came. The writing end stays: its number is not for another pipe."""
        with os.fdopen(self._read, encoding="utf-8") as read:
            os.set_blocking(self._read, False)
            return read.buffer.raw.readall().decode().splitlines()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a LogWriter that is closed write all that waits, however long that takes."""
    monkeypatch.setattr("services.runtime.logs._LAST_SECONDS", CALL_SECONDS)


class TestText:
    def test_shows_the_message_and_then_the_fields(self) -> None:
        line = TextFormatter().format(record(request_id="a", tokens=3, gone=False, seconds=0.5))
        assert line == "said request_id=a tokens=3 gone=false seconds=0.5"

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            ("a\ngateway is ready", r'"a\ngateway is ready"'),
            ("a status=OK", '"a status=OK"'),
            ('a"b', r'"a\"b"'),
            ("\x1b[2J", r'"\u001b[2J"'),
            ("", '""'),
            ("größe", "größe"),
        ],
    )
    def test_no_value_can_look_like_another_line_or_field(self, value: str, shown: str) -> None:
        assert TextFormatter().format(record(request_id=value)) == f"said request_id={shown}"


class TestJson:
    def test_is_one_object_with_time_level_service_logger_message_and_fields(self) -> None:
        line = json.loads(json_formatter("gateway").format(record("a\nb", request_id="x\ny", tokens=3)))
        assert RFC_3339.fullmatch(line.pop("time"))
        assert line == {
            "level": "INFO",
            "service": "gateway",
            "logger": "quire.x",
            "message": "a\nb",
            "request_id": "x\ny",
            "tokens": 3,
        }

    def test_has_the_stack_of_an_exception_in_the_same_line(self) -> None:
        try:
            raise ValueError("wrong")
        except ValueError:
            line = json_formatter("gateway").format(record(exc_info=sys.exc_info()))
        assert "\n" not in line
        assert json.loads(line)["exception"].startswith("Traceback")
        assert json.loads(line)["exception"].endswith("ValueError: wrong")


class TestLogs:
    def test_logging_does_not_wait_for_a_full_pipe(self) -> None:
        pipe = Pipe()
        logs = LogWriter(TextFormatter(), pipe.write)
        for number in range(LINES):
            logs.put(record(f"{number} {'x' * 100}"))
        assert 0 < logs.dropped < LINES
        dropped, read = logs.dropped, threading.Event()
        came: list[str] = []

        def drain() -> None:
            with os.fdopen(os.dup(pipe._read), encoding="utf-8") as reading:
                for line in reading:
                    came.append(line.rstrip())
                    if line.startswith("last"):
                        read.set()
                        return

        thread = threading.Thread(target=drain)
        thread.start()
        while not read.is_set():  # the queue may be full still
            logs.put(record("last"))
            read.wait(0.05)
        thread.join()
        logs.close()
        assert any(
            re.fullmatch(r"\d+ lines of the log were dropped, because it is not read fast enough", one) for one in came
        )
        assert [int(line.split()[0]) for line in came if line[0].isdecimal() and "x" in line][:100] == list(range(100))
        assert len(came) < LINES
        assert logs.dropped >= dropped

    def test_a_full_pipe_does_not_delay_the_end(self) -> None:
        pipe = Pipe()
        logs = LogWriter(TextFormatter(), pipe.write)
        for number in range(LINES):
            logs.put(record(f"{number} {'x' * 100}"))
        logs.close()
        assert len(pipe.abandon()) < LINES

    def test_a_line_that_cannot_be_written_is_no_end_of_the_log(self, patience: None) -> None:
        pipe = Pipe()
        logs = LogWriter(TextFormatter(), pipe.write)
        logs.put(record("%d", args=("no number",)))
        logs.put(record("after it"))
        logs.close()
        first, second = pipe.lines()
        assert first.startswith("a line of the log could not be written: TypeError")
        assert second == "after it"

    def test_a_closed_pipe_loses_only_lines(self, patience: None) -> None:
        read, write = os.pipe()
        os.close(read)
        logs = LogWriter(TextFormatter(), write)
        logs.put(record())
        logs.close()
        os.close(write)
        assert logs.dropped == 1


def test_a_model_that_is_fetched_is_a_line_for_each_stage(caplog: pytest.LogCaptureFixture) -> None:
    stages = StageLog(logging.getLogger("quire"))
    with caplog.at_level(logging.INFO, "quire"):
        for done in range(5):
            stages("Fetching", done, 10)
        stages("Unpacking")
    assert caplog.messages == ["Fetching", "Unpacking"]


UNCAUGHT = """
import logging, sys, threading, warnings
from services.runtime.logs import logging_to_stderr

with logging_to_stderr("engine", "json", "info"):
    warnings.warn("a warning")
    thread = threading.Thread(target=lambda: 1 / 0, name="worker")
    thread.start()
    thread.join()
    logging.getLogger("another").info("not said")
    logging.getLogger("another").warning("said")
    sys.excepthook(ValueError, ValueError("at the end"), None)
"""


def test_uncaught_exceptions_and_warnings_are_logged() -> None:
    done = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, check=True)
    warning, thread, other, last = map(json.loads, done.stderr.splitlines())
    assert (warning["logger"], warning["level"]) == ("py.warnings", "WARNING")
    assert (thread["level"], thread["message"]) == ("CRITICAL", "uncaught exception in thread worker")
    assert thread["exception"].endswith("ZeroDivisionError: division by zero")
    assert (other["logger"], other["message"]) == ("another", "said")
    assert last["exception"] == "ValueError: at the end"


def test_the_log_is_as_it_was_when_the_context_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, hooks = list(logging.getLogger().handlers), (sys.excepthook, threading.excepthook)
    level, own = logging.getLogger().level, logging.getLogger("quire").level
    with suppress(ZeroDivisionError), logging_to_stderr("engine", "text", "error"):
        assert logging.getLogger().level == logging.ERROR
        raise ZeroDivisionError
    assert logging.getLogger().handlers == handlers
    assert (sys.excepthook, threading.excepthook) == hooks
    assert (logging.getLogger().level, logging.getLogger("quire").level) == (level, own)


# Services.


@pytest.fixture(scope="module")
def quire(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    pool = ("--device-blocks", "64", "--max-sequences", "16", "--http-listen", "127.0.0.1:0")
    one = start_quire("--model", str(tiny_model("llama")), "--log-format", "json", *pool)
    yield one
    assert one.settled_pool().sequences == 0
    assert one.close() == 0
    lines = [json.loads(line) for line in one.lines]
    assert {line["service"] for line in lines} == {"serve", "gateway", "engine", "kvmanager"}
    for line in lines:
        assert RFC_3339.fullmatch(line["time"])
        assert line.keys() >= {"level", "logger", "message"}
    assert {"engine attached"} <= {line["message"] for line in lines if line["service"] == "kvmanager"}


def ends(quire: RunningQuire, request_id: str, *services: str) -> dict[str, dict[str, Any]]:
    """Wait until these services, or gateway and engine, have told a request's end, and return what each says."""
    services = services or ("engine", "gateway")
    found: list[dict[str, Any]] = []

    def told() -> bool:
        lines = [json.loads(line) for line in list(quire.lines) if f'"{request_id}"' in line]
        found[:] = [line for line in lines if line["message"] == "request ended"]
        return {line["service"] for line in found} >= set(services)

    wait_until(told, "the end of the request is told")
    own = [line for line in found if line["service"] in services]
    assert sorted(line["service"] for line in own) == sorted(services), "one line each"
    return {line["service"]: line for line in own}


def cut_off(
    quire: RunningQuire, name: str, cut: Callable[[gateway_pb2.GenerateRequest], None], *services: str
) -> dict[str, dict[str, Any]]:
    """Let `cut` end a long request, and return what is told of that; where one was over before, another follows."""
    numbers = count()

    def ended_early() -> dict[str, dict[str, Any]] | None:
        request = named(prompt_request("Once", LONG), f"{name} {next(numbers)}")
        cut(request)
        told = ends(quire, request.request_id, *services)
        return None if told["gateway"]["status"] == "OK" else told

    return in_time(ended_early, "a request is cut off before it has ended by itself")


def named(request: gateway_pb2.GenerateRequest, request_id: str) -> gateway_pb2.GenerateRequest:
    request.request_id = request_id
    return request


def test_the_end_of_a_request_is_one_line_of_the_gateway_and_one_of_the_engine(quire: RunningQuire) -> None:
    answer = quire.generate(named(prompt_request("Once upon a time", 40), "whole"))
    told = ends(quire, answer.started.request_id)
    timing, usage = answer.finished.timing, answer.finished.usage
    counted = {
        "request_id": "whole",
        "model": "tiny-llama",
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "generation_tokens": 40,
        "finish_reason": "length",
        "preemptions": 0,
        "queue_seconds": pytest.approx(timing.queued.ToTimedelta().total_seconds(), abs=1e-5),
    }
    assert told["gateway"].items() >= counted.items()
    assert told["engine"].items() >= counted.items()
    ending = {"protocol": "grpc", "status": "OK", "attempts": 1, "client_gone": False}
    assert told["gateway"].items() >= ending.items()
    assert told["gateway"]["ttft_seconds"] <= told["gateway"]["e2e_seconds"]
    blocks = -(-(usage.prompt_tokens + 39) // 16)
    assert told["engine"]["held_blocks"] >= blocks


def test_the_id_that_http_answers_with_leads_to_the_log_and_to_explain(quire: RunningQuire) -> None:
    body = {"model": "tiny-llama", "prompt": "Once", "max_tokens": 3}
    headers = {"x-request-id": "from-outside"}
    answer = httpx.post(f"{quire.http_url}/v1/completions", json=body, headers=headers, timeout=CALL_SECONDS)
    name = answer.headers["x-request-id"]
    assert "from-outside" in name
    assert ends(quire, name)["gateway"]["protocol"] == "http"
    story = quire.kvmanager.Explain(kvmanager_pb2.ExplainRequest(request_id=name), timeout=10)
    assert {event.request_id for event in story.events} == {name}


def test_a_disconnected_client_is_logged_as_cancelled(quire: RunningQuire) -> None:
    def leave(request: gateway_pb2.GenerateRequest) -> None:
        call = quire.gateway.Generate(request, timeout=CALL_SECONDS)
        next(call)
        call.cancel()

    told = cut_off(quire, "left", leave)
    expected = {"status": "CANCELLED", "client_gone": True, "finish_reason": "abort"}
    assert told["gateway"].items() >= expected.items()
    assert told["engine"]["finish_reason"] == "cancelled"
    assert told["engine"]["held_blocks"] > 0


def test_a_passed_deadline_is_logged_as_such(quire: RunningQuire) -> None:
    def wait(request: gateway_pb2.GenerateRequest) -> None:
        request.timeout.FromMilliseconds(150)
        with suppress(grpc.RpcError):
            quire.generate(request)

    # A gateway that stood still has nothing for the engine any more.
    assert cut_off(quire, "late", wait, "gateway")["gateway"]["status"] == "DEADLINE_EXCEEDED"


def test_a_refused_request_names_the_field_and_repeats_nothing_of_it(quire: RunningQuire) -> None:
    request = named(prompt_request("Once", 3), "refused")
    request.constraint.regex = "(my own secret"
    request.stopping.ignore_eos = False
    with pytest.raises(grpc.RpcError) as refused:
        quire.generate(request)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    told = ends(quire, "refused")
    assert told["gateway"]["field"] == "constraint.regex"
    assert told["engine"]["status"] == "refused"
    assert not [line for line in quire.lines if "my own secret" in line]


def test_no_line_was_dropped(quire: RunningQuire) -> None:
    for url in quire.metrics_urls.values():
        assert Scrape.of(url).value("quire_log_lines_dropped_total") == 0


def test_a_failed_service_logs_the_reason_in_one_line_with_the_stack() -> None:
    process = launch("kvmanager", "--listen", "nonsense", "--log-format", "json")
    output, _ = process.communicate(timeout=CALL_SECONDS)
    assert process.returncode == 1
    told = json.loads(output.splitlines()[-1])
    assert told["message"].startswith("kvmanager failed: AddressUnavailable: cannot listen on nonsense")
    assert told["exception"].startswith("Traceback")


def test_serve_is_ready_however_little_its_services_log(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    arguments = ("--listen", f"unix:{tmp_path}/gateway.sock", "--model", str(tiny_model("llama")))
    process = launch("serve", *arguments, "--device-blocks", "32", "--log-level", "error")
    output = Output(process)
    output.wait_for("ready: gateway at")
    process.terminate()
    assert process.wait(timeout=CALL_SECONDS) == 0
    output.finish()
    assert {line.split(" | ")[0].strip() for line in output.lines} == {"serve"}
