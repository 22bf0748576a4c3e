"""The log's formats, and its bounded queue: services never wait for the reader of a log."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import pytest

from services.models.stage_display import StageLog
from services.runtime.logs.records import LogWriter, TextFormatter, json_formatter, logging_to_stderr, message_of
from tests.running_quire import CALL_SECONDS, launch

LINES = 20_000
RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def record(message: str = "ended", level: int = logging.INFO, **fields: Any) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "quire.x", "levelno": level, "levelname": "INFO", "msg": message, **fields})


class Pipe:
    def __init__(self) -> None:
        self._read, self.write = os.pipe()

    def lines(self) -> list[str]:
        """Close the writing end, and return all lines."""
        os.close(self.write)
        with os.fdopen(self._read, encoding="utf-8") as read:
            return read.read().splitlines()

    def abandon(self) -> list[str]:
        """Close the reading end, and return its lines. The writing end stays open so that its number is not reused."""
        with os.fdopen(self._read, encoding="utf-8") as read:
            os.set_blocking(self._read, False)
            return read.buffer.raw.readall().decode().splitlines()


def overfilled() -> tuple[Pipe, LogWriter]:
    """Log more lines than pipe and queue hold."""
    pipe = Pipe()
    logs = LogWriter(TextFormatter(), pipe.write)
    for number in range(LINES):
        logs.put(record(f"{number} {'x' * 100}"))
    return pipe, logs


@pytest.fixture
def no_close_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.runtime.logs.records._LAST_SECONDS", CALL_SECONDS)


class TestText:
    def test_shows_time_level_and_message_and_then_the_fields(self) -> None:
        line = TextFormatter().format(record(request_id="a", tokens=3, gone=False, seconds=0.5))
        time, _, rest = line.partition(" ")
        assert RFC_3339.fullmatch(time)
        assert rest == "INFO ended request_id=a tokens=3 gone=false seconds=0.5"

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
        assert message_of(TextFormatter().format(record(request_id=value))) == f"ended request_id={shown}"


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
        pipe, logs = overfilled()
        assert 0 < logs.dropped < LINES
        dropped, read = logs.dropped, threading.Event()
        lines: list[str] = []

        def drain() -> None:
            with os.fdopen(os.dup(pipe._read), encoding="utf-8") as reading:
                for line in reading:
                    lines.append(message_of(line.rstrip()))
                    if lines[-1] == "last":
                        read.set()
                        return

        thread = threading.Thread(target=drain)
        thread.start()
        while not read.is_set():  # the queue may still be full
            logs.put(record("last"))
            read.wait(0.05)
        thread.join()
        logs.close()
        assert any(
            re.fullmatch(r"\d+ lines of the log were dropped, because it is not read fast enough", one) for one in lines
        )
        assert [int(line.split()[0]) for line in lines if line[0].isdecimal() and "x" in line][:100] == list(range(100))
        assert len(lines) < LINES
        assert logs.dropped >= dropped

    def test_a_full_pipe_does_not_delay_the_end(self) -> None:
        pipe, logs = overfilled()
        logs.close()
        assert len(pipe.abandon()) < LINES

    def test_a_line_that_cannot_be_formatted_does_not_end_the_log(self, no_close_timeout: None) -> None:
        pipe = Pipe()
        logs = LogWriter(TextFormatter(), pipe.write)
        logs.put(record("%d", args=("no number",)))
        logs.put(record("after it"))
        logs.close()
        first, second = map(message_of, pipe.lines())
        assert first.startswith("a line of the log could not be written: TypeError")
        assert second == "after it"

    def test_a_closed_pipe_loses_only_lines(self, no_close_timeout: None) -> None:
        read, write = os.pipe()
        os.close(read)
        logs = LogWriter(TextFormatter(), write)
        logs.put(record())
        logs.close()
        os.close(write)
        assert logs.dropped == 1


def test_a_fetched_model_is_logged_once_a_stage(caplog: pytest.LogCaptureFixture) -> None:
    stages = StageLog(logging.getLogger("quire"))
    with caplog.at_level(logging.INFO, "quire"):
        for done in range(5):
            stages("Fetching", done, 10)
        stages("Unpacking")
    assert caplog.messages == ["Fetching", "Unpacking"]


UNCAUGHT = """
import logging, sys, threading, warnings
from services.runtime.logs.records import logging_to_stderr

with logging_to_stderr("engine", "json", "info"):
    warnings.warn("a warning")
    thread = threading.Thread(target=lambda: 1 / 0, name="worker")
    thread.start()
    thread.join()
    logging.getLogger("another").info("not shown")
    logging.getLogger("another").warning("shown")
    sys.excepthook(ValueError, ValueError("at the end"), None)
"""


def test_uncaught_exceptions_and_warnings_are_logged() -> None:
    done = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, check=True)
    warning, thread, other, last = map(json.loads, done.stderr.splitlines())
    assert (warning["logger"], warning["level"]) == ("py.warnings", "WARNING")
    assert (thread["level"], thread["message"]) == ("CRITICAL", "uncaught exception in thread worker")
    assert thread["exception"].endswith("ZeroDivisionError: division by zero")
    assert (other["logger"], other["message"]) == ("another", "shown")
    assert last["exception"] == "ValueError: at the end"


def test_the_end_of_the_context_restores_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers, hooks = list(logging.getLogger().handlers), (sys.excepthook, threading.excepthook)
    level, own = logging.getLogger().level, logging.getLogger("quire").level
    with suppress(ZeroDivisionError), logging_to_stderr("engine", "text", "error"):
        assert logging.getLogger().level == logging.ERROR
        raise ZeroDivisionError
    assert logging.getLogger().handlers == handlers
    assert (sys.excepthook, threading.excepthook) == hooks
    assert (logging.getLogger().level, logging.getLogger("quire").level) == (level, own)


def test_a_failed_service_logs_the_reason_in_one_line_with_the_stack() -> None:
    process = launch("kvmanager", "--listen", "unix:/no/folder/x", "--log-format", "json")
    output, _ = process.communicate(timeout=CALL_SECONDS)
    assert process.returncode == 1
    line = json.loads(output.splitlines()[-1])
    assert line["message"].startswith("kvmanager failed: cannot listen on unix:/no/folder/x")
    assert line["exception"].startswith("Traceback")
