"""Another rank, as seen by rank 0: a process on this machine, or the link to one on another machine."""

import json
import queue
import socket
import subprocess
import time
from collections import deque
from dataclasses import asdict

from engine.errors import RankFailed
from services.engine.ranks.link import Kind, Message, RankLink
from services.engine.settings import EngineSettings
from services.runtime.child_process import python_command

_WORKER = "services.engine.ranks.worker_process"
_SECONDS_TO_END = 5.0
_SECONDS_TO_EXIT = 1.0


class OtherRank:
    """The link to a rank, which receives the settings of rank 0."""

    def __init__(self, rank: int, settings: EngineSettings, connection: socket.socket, port: int = 0) -> None:
        """Take over a connection. `port` is that of the store, for a rank on this machine."""
        self.rank = rank
        self.ready: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        """Receives the rank's message that it is ready, None when it has ended."""
        self.sent: deque[float] = deque()  # when each plan was sent that is not launched
        self.seconds_behind = 0.0
        self.received = 0.0  # when the latest message arrived
        self.lost = False
        """Whether its failure is that it lost its connection to another rank: a consequence of that one's failure."""
        self.link = RankLink(connection, f"rank {rank}")
        self.link.send(Kind.START, json.dumps({"rank": rank, "port": port, "settings": asdict(settings)}).encode())

    def take(self, message: Message) -> None:
        """Take a message of the rank. Raises RankFailed if it reports a failure."""
        self.received = time.monotonic()
        match message.kind:
            case Kind.READY:
                self.ready.put(message)
            case Kind.LAUNCHED:
                self.seconds_behind = time.monotonic() - self.sent.popleft()
            case Kind.FAILED:
                raise RankFailed(f"{self.link.peer} failed: {message.body.decode()}")
            case Kind.LOST:
                self.lost = True
                raise RankFailed(f"{self.link.peer} lost the others: {message.body.decode()}")

    def end(self) -> str:
        """Return how the rank ended, whose link has ended."""
        return "its link"

    def wait(self) -> None:
        """Return when the rank has ended, whose link is closed; a process on this machine is killed if need be."""


class LocalRank(OtherRank):
    """A rank whose process rank 0 has started."""

    def __init__(self, rank: int, settings: EngineSettings, port: int) -> None:
        """Start the process. `port` is that of the store."""
        ours, theirs = socket.socketpair()
        command = python_command("-m", _WORKER, str(theirs.fileno()))
        # Ctrl-C reaches the whole terminal's group, but running requests end first.
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        try:
            super().__init__(rank, settings, ours, port)
        except RankFailed as failure:  # it ended before it could receive anything
            raise RankFailed(f"rank {rank} ended {self.end()}") from failure

    def end(self) -> str:
        """Return how the process ended, whose link has ended."""
        try:
            status = self._process.wait(_SECONDS_TO_EXIT)
        except subprocess.TimeoutExpired:
            return super().end()
        return f"by signal {-status}" if status < 0 else f"with status {status}"

    def wait(self) -> None:
        """Return when the process has ended, whose link is closed; it is killed if it does not end by itself."""
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
