"""The event loop of a simulated process: the simulator runs its callbacks one at a time."""

import asyncio
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The part of an event loop that the services use. It has no files, no threads and no time of its own.

    Callbacks run in the order of their calls, as in every loop of asyncio; the simulator decides when. The work of
    `run_in_executor` is one callback more. `failures` has the exceptions that nobody retrieved.
    """

    def __init__(self, clock: Callable[[], float], name: str) -> None:
        """`clock` returns virtual seconds. `name` is the name of the process."""
        self.name = name
        self._clock = clock
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count()
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in the order of their creation
        self.failures: list[str] = []
        self.dead = False

    def has_ready(self) -> bool:
        """Return whether a callback can run now."""
        now = self._clock()
        while self._timers and (self._timers[0][0] <= now or self._timers[0][2].cancelled()):
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled():
                self._ready.append(timer)
        while self._ready and self._ready[0].cancelled():
            self._ready.popleft()
        return bool(self._ready)

    def next_timer(self) -> float | None:
        """Return the time of the next timer, if any."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def run_one(self) -> bool:
        """Run the next callback; return whether it was one, and not a timer."""
        handle = self._ready.popleft()
        if not handle.cancelled():
            self.run(handle._run)
        return not isinstance(handle, asyncio.TimerHandle)

    def run(self, function: Callable[[], _Result]) -> _Result:
        """Call a function with this loop as the running one."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            return function()
        finally:
            asyncio._set_running_loop(before)

    def kill(self) -> None:
        """Drop all callbacks and timers: the process is dead, and nothing is ever called again.

        Its tasks are kept until `close_coroutines`, because Python runs the `finally` blocks of dropped coroutines.
        """
        self.dead = True
        self._ready.clear()
        self._timers.clear()

    def close_coroutines(self) -> None:
        """Close the coroutines of all tasks. Their `finally` blocks run now, without a running loop."""
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if (coroutine := task.get_coro()) is not None:
                with suppress(Exception):  # a block may need the loop that no longer runs
                    coroutine.close()
        self._tasks.clear()

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._clock()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run a callback behind those that are ready; in a dead process, never."""
        handle = asyncio.Handle(callback, args, self, context)
        if not self.dead:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback after `delay` seconds."""
        return self.call_at(self._clock() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Run a callback at a time; in a dead process, never."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if not self.dead:
            heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer leaves when it is due."""

    def create_future(self) -> "asyncio.Future[Any]":
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, _Result] | Generator[Any, None, _Result],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> "asyncio.Task[_Result]":
        """Run a coroutine as a task of this process."""
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.pop(task, None)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., _Result], *args: Any
    ) -> "asyncio.Future[_Result]":
        """Call a function as one callback: threads of a pool have no order of their own here."""
        del executor
        future: asyncio.Future[_Result] = self.create_future()

        def run() -> None:
            if future.done():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(run)
        return future

    def get_debug(self) -> bool:
        """Return False."""
        return False

    def is_running(self) -> bool:
        """Return True: callbacks run whenever the simulator chooses them."""
        return True

    def is_closed(self) -> bool:
        """Return False."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Record an exception that nobody retrieved."""
        if not self.dead:
            self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")
