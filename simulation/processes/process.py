"""What all simulated processes have."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from simulation.event_loop import SimulatedLoop


class Process:
    """A process: its loop, and for an engine its thread. A `stopped` process runs nothing until it continues."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        # What it lacks is for files, sockets and processes.
        self.loop = SimulatedLoop(clock, name)  # type: ignore[abstract]
        self.stopped = False
        self.continues_at = 0.0  # of the latest stop
        self.stopped_seconds = 0.0  # in total
        self.ending = False  # asked to
        self.exit: str | None = None  # why it has ended
        self.killed_inside = False  # between two stores to kept memory

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work on the loop; an exception of it is a failure of the process."""
        self.loop.run(lambda: self.loop.create_task(work)).add_done_callback(self._on_end)

    def thread_can_run(self, now: float) -> bool:
        """Return whether its thread, if it has one, can run now."""
        del now
        return False

    def thread_wakes_at(self) -> float | None:
        """Return the time at which its thread can run without an event, if it sleeps for a time."""
        return None

    def run_thread(self) -> None:
        """Run what `thread_can_run` reports."""

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.failures.append(f"it ends: {error!r}")
