"""The other ranks of an engine, as seen by rank 0: it sends them the plans, watches them, and ends them."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from engine.errors import RankFailed
from services.engine.observer import RankStats
from services.engine.ranks.link import Kind
from services.engine.ranks.other_rank import OtherRank

# Heartbeats within the time after which a rank counts as stopped.
_HEARTBEATS = 4
# The failure of one rank ends the collectives of all: for the cause to arrive, when a consequence came first.
_SECONDS_FOR_CAUSE = 1.0
# For a start to end by itself after the failure of a rank; on GPUs its thread may wait for that rank.
_SECONDS_TO_END_START = 10.0

log = logging.getLogger("quire.engine")


class RankGroup:
    """Ranks 1 and up. If one of them ends, fails or stops, all do."""

    def __init__(self, ranks: Sequence[OtherRank], seconds: float) -> None:
        """Receive their messages. They read the model's configuration, and are `ready` then."""
        self.waited: Callable[[], float] = lambda: 0.0
        """Returns the seconds of rank 0 in collectives."""
        self._plans = self._plan_bytes = 0
        self._seconds = seconds
        self._failed: Callable[[RankFailed], None] = self._end_start
        self._failure: RankFailed | None = None
        self._has_failed = threading.Event()
        self._closed = threading.Event()
        self._ranks = ranks
        for one in self._ranks:
            threading.Thread(target=self._receive, args=(one,), name=one.link.peer, daemon=True).start()

    def wait_until_ready(self, mine: dict[str, str] | None = None) -> None:
        """Return when every rank is ready for the next message. Raises RankFailed with a rank's reason.

        `mine` has what must be the same on all ranks, by name; another value of a rank raises RankFailed.
        """
        for one in self._ranks:
            message = one.ready.get()
            if message is None:
                raise self.reason(RankFailed(f"{one.link.peer} cannot start"))
            if mine is not None:
                _check_equal(one.link.peer, mine, json.loads(message.body))

    def connect(self) -> None:
        """Let all ranks connect to each other, and load their slices."""
        for one in self._ranks:
            one.link.send(Kind.CONNECT)

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
        """End all ranks."""
        self._closed.set()
        for one in self._ranks:
            one.link.close()
        for one in self._ranks:
            one.wait()

    def _receive(self, one: OtherRank) -> None:
        """Body of a rank's thread."""
        try:
            while (message := one.link.receive()) is not None:
                one.take(message)
            status = one.end()
            raise RankFailed(f"{one.link.peer} ended {status}")
        except RankFailed as failure:
            if one.lost:
                self._has_failed.wait(_SECONDS_FOR_CAUSE)
            self._record(failure)

    def _record(self, failure: RankFailed) -> None:
        if self._closed.is_set() or self._has_failed.is_set():
            return
        self._failure = failure
        self._has_failed.set()
        for one in self._ranks:  # the others may wait for this one
            one.ready.put(None)
        self._failed(failure)

    def _end_start(self, failure: RankFailed) -> None:
        if not self._closed.wait(_SECONDS_TO_END_START) and self._failed == self._end_start:
            log.error("engine failed: %s", failure)
            os._exit(1)

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(self._seconds / _HEARTBEATS):
            for one in self._ranks:
                if time.monotonic() - one.received > self._seconds:
                    self._record(RankFailed(f"{one.link.peer} has not responded for {self._seconds:g} s"))
                    return
                with suppress(RankFailed):  # its receiving thread reports it
                    one.link.send(Kind.HEARTBEAT)


def _check_equal(peer: str, mine: dict[str, str], theirs: dict[str, Any]) -> None:
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise RankFailed(f"{peer} has another {name} than rank 0: {theirs.get(name)}, not {value}")
