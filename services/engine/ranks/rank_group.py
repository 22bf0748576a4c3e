"""The other ranks of an engine, as seen by rank 0: it starts them, watches them, and ends them."""

import json
import logging
import queue
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from engine.errors import RankFailed
from services.engine.observer import RankStats
from services.engine.ranks.link import Kind, Message, RankLink
from services.engine.settings import EngineSettings
from services.runtime.child_process import python_command

_WORKER = "services.engine.ranks.worker_process"
# Heartbeats within the time after which a rank counts as stopped.
_HEARTBEATS = 4
_SECONDS_TO_END = 5.0
# The failure of one rank ends the collectives of all: for the cause to arrive, when a consequence came first.
_SECONDS_FOR_CAUSE = 1.0

log = logging.getLogger("quire.engine")


class RankGroup:
    """The processes of ranks 1 and up. If one of them ends, fails or stops, all do."""

    def __init__(self, settings: EngineSettings) -> None:
        """Start the processes. They read the model's configuration, and are `ready` then."""
        self.waited: Callable[[], float] = lambda: 0.0
        """Returns the seconds of rank 0 in collectives."""
        self._plans = self._plan_bytes = 0
        self._seconds = settings.rank_seconds
        self._failed: Callable[[RankFailed], None] = lambda _: None
        self._failure: RankFailed | None = None
        self._has_failed = threading.Event()
        self._closed = threading.Event()
        self._ranks = [_OtherRank(rank, settings) for rank in range(1, settings.tensor_parallel)]
        for one in self._ranks:
            threading.Thread(target=self._receive, args=(one,), name=one.link.peer, daemon=True).start()

    def wait_until_ready(self) -> None:
        """Return when every rank is ready for the next message. Raises RankFailed with a rank's reason."""
        for one in self._ranks:
            if not one.ready.get():
                raise self.reason(RankFailed(f"{one.link.peer} cannot start"))

    def connect(self, port: int) -> None:
        """Send all ranks the port of the store, so that they connect to each other."""
        for one in self._ranks:
            one.link.send(Kind.CONNECT, str(port).encode())

    def send_plan(self, message: bytes) -> None:
        """Send a plan to all ranks. Raises RankFailed."""
        self._plans += 1
        self._plan_bytes += len(message)
        for one in self._ranks:
            one.sent.append(time.monotonic())
            one.link.send(Kind.PLAN, message)

    def watch(self, failed: Callable[[RankFailed], None]) -> None:
        """Expect a response to every heartbeat from now on. `failed` receives the first failure, on another thread."""
        self._failed = failed
        for one in self._ranks:
            one.received = time.monotonic()
            one.link.limit_sending(self._seconds)
        threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True).start()
        if self._failure:
            failed(self._failure)

    def reason(self, failure: Exception) -> Exception:
        """Return the failure of another rank if there is one: it explains a failure of rank 0."""
        self._has_failed.wait(2 * _SECONDS_FOR_CAUSE)
        return self._failure or failure

    def stats(self) -> RankStats:
        """Return what was sent to the ranks, and how long this process waited for them."""
        behind = {one.rank: one.seconds_behind for one in self._ranks}
        return RankStats(self.waited(), self._plans, self._plan_bytes, behind)

    def close(self) -> None:
        """End all ranks; those that do not end by themselves are killed."""
        self._closed.set()
        for one in self._ranks:
            one.link.close()
        for one in self._ranks:
            try:
                one.process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()

    def _receive(self, one: "_OtherRank") -> None:
        """Body of a rank's thread."""
        try:
            while (message := one.link.receive()) is not None:
                one.take(message)
            status = one.end()
            raise RankFailed(f"{one.link.peer} ended {status}")
        except _RankLost as consequence:
            self._has_failed.wait(_SECONDS_FOR_CAUSE)
            self._record(consequence)
        except RankFailed as failure:
            self._record(failure)
        finally:
            one.ready.put(False)

    def _record(self, failure: RankFailed) -> None:
        if self._closed.is_set() or self._has_failed.is_set():
            return
        self._failure = failure
        self._has_failed.set()
        self._failed(failure)

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(self._seconds / _HEARTBEATS):
            for one in self._ranks:
                if time.monotonic() - one.received > self._seconds:
                    self._record(RankFailed(f"{one.link.peer} has not responded for {self._seconds:g} s"))
                    return
                with suppress(RankFailed):  # its receiving thread reports it
                    one.link.send(Kind.HEARTBEAT)


class _RankLost(RankFailed):
    """A rank lost its connection to another rank: a consequence of that one's failure."""


class _OtherRank:
    """One process, and its link."""

    def __init__(self, rank: int, settings: EngineSettings) -> None:
        self.rank = rank
        self.ready: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.sent: deque[float] = deque()  # when each plan was sent that is not launched
        self.seconds_behind = 0.0
        self.received = 0.0  # when the latest message arrived
        ours, theirs = socket.socketpair()
        command = python_command("-m", _WORKER, str(theirs.fileno()))
        # Ctrl-C reaches the whole terminal's group, but running requests end first.
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self.link = RankLink(ours, f"rank {rank}")
        self.link.send(Kind.START, json.dumps({"rank": rank, "settings": asdict(settings)}).encode())

    def take(self, message: Message) -> None:
        """Take a message of the rank. Raises RankFailed if it reports a failure."""
        self.received = time.monotonic()
        match message.kind:
            case Kind.READY:
                self.ready.put(True)
            case Kind.LAUNCHED:
                self.seconds_behind = time.monotonic() - self.sent.popleft()
            case Kind.FAILED:
                raise RankFailed(f"{self.link.peer} failed: {message.body.decode()}")
            case Kind.LOST:
                raise _RankLost(f"{self.link.peer} lost the others: {message.body.decode()}")

    def end(self) -> str:
        """Return how the process ended, whose link has ended."""
        try:
            status = self.process.wait(_SECONDS_FOR_CAUSE)
        except subprocess.TimeoutExpired:
            return "its link"
        return f"by signal {-status}" if status < 0 else f"with status {status}"
