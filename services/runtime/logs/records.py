"""The log of a process: one line per record on standard error, as text or JSON.

A thread writes the lines from a bounded queue, so that no caller waits for a full pipe. Lines that do not fit into the
queue are dropped and counted; a later line reports their number.
"""

import copy
import faulthandler
import json
import logging
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler
from types import TracebackType
from typing import Any

from services.runtime.settings import setting

# At this signal a process writes the stacks of its threads to standard error, and goes on.
STACKS_SIGNAL = signal.SIGUSR1

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

_FORMAT = "Format of the log: text; or json, one object per line."
_LEVEL = "Minimum level of the log. Other packages log from warning on."

# RFC 3339, UTC.
_TIME, _MILLISECONDS = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"
_TEXT_HEAD = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z [A-Z]+ ")
_STANDARD_ERROR = 2
_MAX_QUEUED = 4096
_LAST_SECONDS = 1.0
# Attributes of every record; all others come from `extra`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

log = logging.getLogger("quire")


def format_setting() -> Any:
    """Declare the field `log_format` of a service's settings."""
    return setting("text", _FORMAT, choices=FORMATS)


def level_setting() -> Any:
    """Declare the field `log_level` of a service's settings."""
    return setting("info", _LEVEL, choices=LEVELS)


def print_stacks_at_signal() -> None:
    """Write the stacks of all threads at STACKS_SIGNAL, also while a thread is blocked in native code."""
    faulthandler.register(STACKS_SIGNAL, file=_STANDARD_ERROR)


class LogWriter:
    """Writes lines and records from any thread, in order, to a file descriptor."""

    def __init__(self, formatter: logging.Formatter, descriptor: int = _STANDARD_ERROR) -> None:
        """Start the thread."""
        self.dropped = 0  # lines that did not fit into the queue
        self._reported_drops = 0
        self._counting = threading.Lock()
        self._formatter = formatter
        self._descriptor = descriptor
        self._queue: queue.Queue[logging.LogRecord | str | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def put(self, line: logging.LogRecord | str) -> None:
        """Queue a record or a line. Never waits."""
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._drop()

    def close(self) -> None:
        """Write the queued lines, for at most a second."""
        with suppress(queue.Full):
            self._queue.put(None, timeout=_LAST_SECONDS)
            self._thread.join(_LAST_SECONDS)

    def _write_all(self) -> None:
        while (line := self._queue.get()) is not None:
            if not self._write(line):
                self._drop()
            elif self.dropped != self._reported_drops:
                missed, self._reported_drops = self.dropped - self._reported_drops, self.dropped
                message = f"{missed} lines of the log were dropped, because it is not read fast enough"
                self._write(logging.LogRecord(log.name, logging.WARNING, "", 0, message, None, None))

    def _drop(self) -> None:
        with self._counting:
            self.dropped += 1

    def _formatted(self, record: logging.LogRecord) -> str:
        try:
            return self._formatter.format(record)
        except Exception as error:  # an uncaught exception would end the thread
            message = f"a line of the log could not be written: {type(error).__name__}: {error}"
            return self._formatter.format(logging.LogRecord(log.name, logging.ERROR, "", 0, message, None, None))

    def _write(self, line: logging.LogRecord | str) -> bool:
        """Return True if the text was written."""
        text = line if isinstance(line, str) else self._formatted(line)
        rest = f"{text}\n".encode(errors="backslashreplace")
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:  # the pipe is closed
            return False
        return True


class _Handler(QueueHandler):
    """Formats messages and exceptions at once, because their arguments may change; then queues the record."""

    def __init__(self, logs: LogWriter) -> None:
        super().__init__(queue.SimpleQueue())
        self._logs = logs
        self._plain = logging.Formatter()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        record = copy.copy(record)
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = record.exc_text or self._plain.formatException(record.exc_info)
            record.exc_info = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        self._logs.put(record)


class TextFormatter(logging.Formatter):
    """Time, level and message, followed by the extra fields as `name=value`; special characters are quoted.

    A stack trace follows on separate lines.
    """

    converter = staticmethod(time.gmtime)
    default_time_format, default_msec_format = _TIME, _MILLISECONDS

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return time, level, message and fields."""
        fields = (f" {name}={_shown(value)}" for name, value in vars(record).items() if name not in _OWN)
        return f"{self.formatTime(record)} {record.levelname} {record.message}{''.join(fields)}"


def message_of(line: str) -> str:
    """Return the message of a line in either format; a line that is in none is returned whole."""
    if not line.startswith("{"):
        return _TEXT_HEAD.sub("", line)
    try:
        message = json.loads(line)["message"]
    except (ValueError, KeyError):
        return line
    return message if isinstance(message, str) else line


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    plain = text.isprintable() and not any(sign in text for sign in ' "=') and text
    return text if plain else json.dumps(text)


def json_formatter(service: str) -> logging.Formatter:
    """Return a formatter for JSON objects: time (RFC 3339, UTC), level, service, logger, message, fields."""
    from pythonjsonlogger.json import JsonFormatter

    formatter = JsonFormatter(
        ["asctime", "levelname", "name", "message"],
        rename_fields={"asctime": "time", "levelname": "level", "name": "logger", "exc_info": "exception"},
        static_fields={"service": service},
    )
    formatter.converter = time.gmtime
    formatter.default_time_format, formatter.default_msec_format = _TIME, _MILLISECONDS
    return formatter


@contextmanager
def logging_to_stderr(service: str, log_format: str, level: str) -> Iterator[LogWriter]:
    """Log to standard error, including warnings and uncaught exceptions."""
    logs = LogWriter(json_formatter(service) if log_format == "json" else TextFormatter())
    root, lowest = logging.getLogger(), getattr(logging, level.upper())
    handler = _Handler(logs)
    before = (root.level, log.level, sys.excepthook, threading.excepthook)
    root.addHandler(handler)
    root.setLevel(max(lowest, logging.WARNING))
    log.setLevel(lowest)
    logging.captureWarnings(True)
    sys.excepthook, threading.excepthook = _uncaught, _uncaught_in_thread
    try:
        yield logs
    finally:
        logging.captureWarnings(False)
        root_level, level_before, sys.excepthook, threading.excepthook = before
        root.setLevel(root_level)
        log.setLevel(level_before)
        root.removeHandler(handler)
        logs.close()


def _uncaught(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
    log.critical("uncaught exception", exc_info=(kind, error, stack))


def _uncaught_in_thread(hook: threading.ExceptHookArgs) -> None:
    name = hook.thread.name if hook.thread else "unknown"
    error = hook.exc_value or hook.exc_type()
    log.critical("uncaught exception in thread %s", name, exc_info=(hook.exc_type, error, hook.exc_traceback))
