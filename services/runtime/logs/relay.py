"""The log of a container as JSON, including what is written without Python's logging.

Native libraries, an interpreter that aborts and the parser of the command line write plain lines. In a container whose
log is JSON, process 1 therefore only starts the service as its child and passes on the lines of both outputs: JSON
unchanged, others as records. The lines of a crash arrive too, because process 1 outlives it.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from services.runtime.logs.records import STACKS_SIGNAL, json_formatter

SERVICES = ("engine", "gateway", "kvmanager", "serve")
_STANDARD_OUTPUT, _STANDARD_ERROR = 1, 2
_CHUNK = 65536
# Bytes of a line; longer ones are cut.
_LONGEST_LINE = 1024 * 1024
_LAST_SECONDS = 1.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, STACKS_SIGNAL)
# Waited for instead of handled: a handler may run between two calls that wait, and the second would wait forever.
_AWAITED = (*_FORWARDED, signal.SIGCHLD)
# Exit status of a process that a signal ended, as shells have it.
_ENDED_BY_SIGNAL = 128


def service_with_json_log(arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the service that this command line starts with a log in JSON, empty if it does not."""
    service = arguments[0] if arguments else ""
    if service not in SERVICES:
        return ""
    chosen = environment.get(f"QUIRE_{service.upper()}_LOG_FORMAT", "")
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if option == "--log-format":
            chosen = value
        elif option.startswith("--log-format="):
            chosen = option.partition("=")[2]
    return service if chosen == "json" else ""


def relay_child(service: str) -> None:
    """Fork, and return in the child; this process passes on its lines, and exits when the child does.

    Must be called before any thread starts.
    """
    reading, writing = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(reading)
        for output in (_STANDARD_OUTPUT, _STANDARD_ERROR):
            os.dup2(writing, output)
        os.close(writing)
        return
    os.close(writing)
    os._exit(_relay(service, child, reading))


def _relay(service: str, child: int, reading: int) -> int:
    """Pass lines on until the child ends; return its exit status."""
    formatter = json_formatter(service)
    relaying = threading.Thread(target=_pass_on, args=(formatter, reading), daemon=True)
    relaying.start()
    status = _status_of(child)
    relaying.join(_LAST_SECONDS)  # orphans may hold the pipe longer
    if status >= 0:
        return status
    name = signal.Signals(-status).name
    _write(_record(formatter, logging.ERROR, f"{service} was ended by {name}"))
    return _ENDED_BY_SIGNAL - status


def _status_of(child: int) -> int:
    """Forward signals to the child until it ends. As process 1, this one also reaps processes without parents."""
    while True:
        received = signal.sigwait(_AWAITED)
        if received != signal.SIGCHLD:
            os.kill(child, received)
        elif (status := _reaped().get(child)) is not None:
            return os.waitstatus_to_exitcode(status)


def _reaped() -> dict[int, int]:
    """Return the status of each process that has ended; one signal may stand for several."""
    ended = {}
    with suppress(ChildProcessError):  # none is left
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def _pass_on(formatter: logging.Formatter, reading: int) -> None:
    for line in _lines(reading):
        if line.startswith(b"{") and line.endswith(b"}"):
            _write(line)
        elif text := line.decode(errors="replace").rstrip():
            _write(_record(formatter, logging.WARNING, text))


def _lines(reading: int) -> Iterator[bytes]:
    rest = b""
    while chunk := os.read(reading, _CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
        if len(rest) > _LONGEST_LINE:
            yield rest
            rest = b""
    if rest:
        yield rest


def _record(formatter: logging.Formatter, level: int, message: str) -> bytes:
    return formatter.format(logging.LogRecord("output", level, "", 0, message, None, None)).encode()


def _write(line: bytes) -> None:
    rest = line + b"\n"
    while rest:
        rest = rest[os.write(_STANDARD_ERROR, rest) :]
