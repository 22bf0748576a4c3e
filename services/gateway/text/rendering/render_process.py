"""Starts and calls the process that renders the templates of one model."""

import os
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from services.gateway.text.rendering.frames import receive, send
from services.gateway.text.rendering.worker import COMPILE_SECONDS, RENDER_SECONDS, Answer
from services.runtime.child_process import python_command

_WORKER = "services.gateway.text.rendering.worker"
# For a busy machine: elsewhere the limit of processor time is reached first.
_MAX_SECONDS = 20.0
# The variables of the gateway may have secrets.
_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "PATH", "TZ", "LANG", "LC_ALL", "LC_TIME")


class _Running(NamedTuple):
    process: "subprocess.Popen[bytes]"
    connection: socket.socket

    def end(self) -> int:
        """End the process with its forks, and return its status."""
        self.connection.close()
        with self.process, suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.returncode


class RenderProcess:
    """Renders templates by name, one at a time; threads wait for each other.

    The process starts with the first rendering, and again if it has ended.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._lock = threading.Lock()
        self._running: list[_Running] = []
        self._finalizer = weakref.finalize(self, _end_all, self._running)

    def render(self, template: str, variables: Mapping[str, Any], seconds: float = RENDER_SECONDS) -> Answer:
        """Return the text of a template, or the reason why there is none; `seconds` limits its processor time."""
        with self._lock:
            if not self._running:
                self._running.append(_started(self._sources))
            connection = self._running[0].connection
            try:
                send(connection, {"template": template, "variables": variables, "seconds": seconds})
                return Answer(*receive(connection))
            except TimeoutError:
                self._running.pop().end()
                reason = f"it takes more than {_MAX_SECONDS:.0f} seconds"
                return Answer(None, reason, limit=True, timed_out=True, seconds=seconds)
            except (OSError, EOFError, ValueError):
                return Answer(None, _reason(self._running.pop().end()), limit=True)

    def close(self) -> None:
        """End the process."""
        self._finalizer()


def _started(sources: Mapping[str, str]) -> _Running:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: S603 (a module of ours)
            python_command("-m", _WORKER),
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,  # Ctrl-C is for the gateway; this process ends with its connection
        )
    ours.settimeout(_MAX_SECONDS)
    with suppress(OSError):  # of a process that has ended at once; the next call reports it
        send(ours, sources)
    return _Running(process, ours)


def _end_all(running: list[_Running]) -> None:
    while running:
        running.pop().end()


def _reason(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it takes more than {COMPILE_SECONDS:.0f} seconds of processor time to compile it"
    return f"the process that renders it has ended with the status {status}"
