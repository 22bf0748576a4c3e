"""Copy streams for tests: one that holds each copy until it is released, and ones that delay copies."""

import queue
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all

from engine.attention.backend import Direction
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
    """Copies on a thread for each direction, each copy when it is released.

    `events` receives the copies that a step, or a copy of the other direction, starts to wait for.
    """

    def __init__(self) -> None:
        self.copies: list[HeldCopy] = []
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._threads = {one: ThreadPoolExecutor(1) for one in Direction}

    def launch(self, copy: Callable[[], None], direction: Direction) -> Event:
        self.copies.append(HeldCopy(copy, self._threads[direction], self.events))
        return self.copies[-1]

    def close(self) -> None:
        for copy in self.copies:
            copy.release()
        for thread in self._threads.values():
            thread.shutdown()


class FreeCopyStream(HeldCopyStream):
    """Copies without a delay."""

    def launch(self, copy: Callable[[], None], direction: Direction) -> Event:
        event = super().launch(copy, direction)
        self.copies[-1].release()
        return event


class LateCopyStream:
    """Runs no copy before something waits for it, then those before it in its direction: the latest possible one."""

    def __init__(self) -> None:
        self.launched = 0
        self._pending: dict[Direction, deque[tuple[LateCopy, Callable[[], None]]]] = {one: deque() for one in Direction}

    def launch(self, copy: Callable[[], None], direction: Direction) -> Event:
        self.launched += 1
        event = LateCopy(self, direction)
        self._pending[direction].append((event, copy))
        return event

    def run_to(self, event: "LateCopy") -> None:
        while not event.ended:
            first, copy = self._pending[event.direction].popleft()
            copy()
            first.ended = True

    def run_next(self, direction: Direction) -> None:
        if self._pending[direction]:
            self.run_to(self._pending[direction][0][0])

    def close(self) -> None:
        for pending in self._pending.values():
            pending.clear()


class LateCopy:
    def __init__(self, stream: LateCopyStream, direction: Direction) -> None:
        self.ended = False
        self.direction = direction
        self._stream = stream

    def query(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self._stream.run_to(self)


class UnevenCopyStream(LateCopyStream):
    """Runs the next copies of a random direction at each launch, so that either one may be ahead."""

    def __init__(self) -> None:
        super().__init__()
        self._source = random.Random(7)

    def launch(self, copy: Callable[[], None], direction: Direction) -> Event:
        event = super().launch(copy, direction)
        for one in self._source.choices(tuple(Direction), k=self._source.randrange(3)):
            self.run_next(one)
        return event
