"""The other ranks of an engine, as seen by rank 0: it starts them, watches them, and ends them."""

import json
import logging
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from engine.errors import RankFailed
from services.engine.ranks.link import Kind, RankLink
from services.engine.settings import EngineSettings
from services.runtime.child_process import python_command

_WORKER = "services.engine.ranks.worker_process"
# Heartbeats within the time after which a rank counts as stopped.
_HEARTBEATS = 4
_SECONDS_TO_END = 5.0
# For the reason of a failed rank, after a collective with it has failed.
_SECONDS_FOR_REASON = 2.0

log = logging.getLogger("quire.engine")


class RankGroup:
    """The processes of ranks 1 and up. If one of them ends, fails or stops, all do."""

    def __init__(self, settings: EngineSettings) -> None:
        """Start the processes. They read the model's configuration, and are `ready` then."""
        self._seconds = settings.rank_seconds
        self._failure: RankFailed | None = None
        self._has_failed = threading.Event()
        self._closed = threading.Event()
        self._links: list[RankLink] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, settings.tensor_parallel):
            self._start(rank, settings)

    def wait_until_ready(self) -> None:
        """Return when every rank is ready for the next message. Raises RankFailed with a rank's reason."""
        for rank, link in enumerate(self._links, 1):
            message = link.receive()
            if message is None:
                raise RankFailed(f"{link.peer} ended with status {self._processes[rank - 1].wait()} before it was ready")
            if message.kind is Kind.FAILED:
                raise RankFailed(f"{link.peer} cannot start: {message.body.decode()}")

    def connect(self, port: int) -> None:
        """Tell all ranks the port of the store, so that they connect to each other."""
        for link in self._links:
            link.send(Kind.CONNECT, str(port).encode())

    def send_plan(self, message: bytes) -> None:
        """Send a plan to all ranks. Raises RankFailed."""
        for link in self._links:
            link.send(Kind.PLAN, message)

    def watch(self, failed: Callable[[RankFailed], None]) -> None:
        """Watch all ranks from now on; the first failure is passed to `failed`, on another thread."""
        for link in self._links:
            link.limit(self._seconds)
            threading.Thread(target=self._receive_all, args=(link, failed), name=link.peer, daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True).start()

    def reason(self, failure: Exception) -> RankFailed:
        """Return the failure of another rank that explains a failure of rank 0, or that of rank 0."""
        self._has_failed.wait(_SECONDS_FOR_REASON)
        return self._failure or RankFailed(f"rank 0 failed: {failure}")

    def close(self) -> None:
        """End all ranks; those that do not end by themselves are killed."""
        self._closed.set()
        for link in self._links:
            link.close()
        for process in self._processes:
            try:
                process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, rank: int, settings: EngineSettings) -> None:
        ours, theirs = socket.socketpair()
        command = python_command("-m", _WORKER, str(theirs.fileno()))
        # Ctrl-C reaches the whole terminal's group, but running requests end first.
        self._processes.append(
            subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True)
        )
        theirs.close()
        link = RankLink(ours, f"rank {rank}")
        self._links.append(link)
        link.send(Kind.START, json.dumps({"rank": rank, "settings": asdict(settings)}).encode())

    def _receive_all(self, link: RankLink, failed: Callable[[RankFailed], None]) -> None:
        """Body of a rank's thread."""
        try:
            while (message := link.receive()) is not None:
                if message.kind is Kind.FAILED:
                    raise RankFailed(f"{link.peer} failed: {message.body.decode()}")
            raise RankFailed(f"{link.peer} has ended")
        except RankFailed as failure:
            if self._closed.is_set() or self._has_failed.is_set():
                return
            self._failure = failure
            self._has_failed.set()
            failed(failure)

    def _send_heartbeats(self) -> None:
        with suppress(RankFailed):  # its receiving thread reports it
            while not self._closed.wait(self._seconds / _HEARTBEATS):
                for link in self._links:
                    link.send(Kind.HEARTBEAT)
