"""Copy streams for tests: one that holds each copy until it is released, and one that delays all copies."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all

from engine.gpu.copy_stream import Event

MAX_SECONDS = 30.0


class HeldCopy:
    """A copy that starts when it is released, and its event."""

    def __init__(
        self, copy: Callable[[], None], thread: ThreadPoolExecutor, events: "queue.SimpleQueue[object]"
    ) -> None:
        self._copy = copy
        self._gate = threading.Event()
        self._events = events
        self._end = thread.submit(self._run)

    def _run(self) -> None:
        assert self._gate.wait(MAX_SECONDS), "the copy was never released"
        self._copy()

    def query(self) -> bool:
        return self._end.done() and self._end.result() is None

    def wait(self) -> None:
        if not self._end.done():
            self._events.put(self)
        self._end.result(MAX_SECONDS)

    def release(self) -> None:
        self._gate.set()

    def finish(self) -> None:
        """Release the copy and wait for its end, with or without an error."""
        self.release()
        assert wait_for_all([self._end], MAX_SECONDS).done


class HeldCopyStream:
    """Copies on one thread, each when it is released. `events` receives the copies that a step starts to wait for."""

    def __init__(self) -> None:
        self.copies: list[HeldCopy] = []
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(1)

    def launch(self, copy: Callable[[], None]) -> Event:
        self.copies.append(HeldCopy(copy, self._thread, self.events))
        return self.copies[-1]

    def close(self) -> None:
        for copy in self.copies:
            copy.release()
        self._thread.shutdown()


class FreeCopyStream(HeldCopyStream):
    """Copies on one thread without a delay."""

    def launch(self, copy: Callable[[], None]) -> Event:
        event = super().launch(copy)
        self.copies[-1].release()
        return event


class LateCopyStream:
    """Runs no copy before something waits for it, then all before it: the latest possible stream."""

    def __init__(self) -> None:
        self.launched = 0
        self._pending: deque[tuple[LateCopy, Callable[[], None]]] = deque()

    def launch(self, copy: Callable[[], None]) -> Event:
        self.launched += 1
        event = LateCopy(self)
        self._pending.append((event, copy))
        return event

    def run_to(self, event: "LateCopy") -> None:
        while not event.query():
            first, copy = self._pending.popleft()
            copy()
            first.ended = True

    def close(self) -> None:
        self._pending.clear()


class LateCopy:
    def __init__(self, stream: LateCopyStream) -> None:
        self.ended = False
        self._stream = stream

    def query(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self._stream.run_to(self)
