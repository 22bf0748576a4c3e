"""Load processes: each runs a share of the load in its own event loop, separate from the terminal's display."""

import asyncio
import contextlib
import multiprocessing
import signal
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from services.loadgen.clients.opening import open_client
from services.loadgen.clients.target import Target, Unreachable
from services.loadgen.driver import Driver, Progress
from services.loadgen.records import Record
from services.loadgen.workload.load import Load
from services.runtime.child_process import safe_path

_START_SECONDS = 120
# From the start command to the start: all processes have received it by then.
_LEAD_SECONDS = 0.2
_PROGRESS_SECONDS = 0.25
_PROBE_SECONDS = 0.01
_JOIN_SECONDS = 10


class ProcessDied(Exception):
    """A load process ended without its results."""


@dataclass(frozen=True)
class Share:
    """Measurements of one process: its requests and its own load.

    `lags` are the delays of its event loop in seconds, sampled every 10 ms.
    """

    records: list[Record]
    seconds: float
    cpu_seconds: float
    lags: "array[float]"


Seen = Callable[[float, Sequence[Progress]], None]


def run(target: Target, load: Load, processes: int, seen: Seen) -> tuple[list[Share], bool]:
    """Run a load in `processes` processes; return their shares, and True if Ctrl-C interrupted it.

    `seen` receives the seconds since the start and the progress of each process. Raises ProcessDied, Unreachable.
    """
    # A fork would carry gRPC's threads along.
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(processes)]
    workers = [
        context.Process(target=_work, args=(theirs, target, load, (number, processes)), daemon=True)
        for number, (_, theirs) in enumerate(pipes)
    ]
    connections = [ours for ours, _ in pipes]
    try:
        for worker, (_, theirs) in zip(workers, pipes, strict=True):
            with safe_path():
                worker.start()
            theirs.close()
        return _run(connections, seen)
    finally:
        for connection in connections:
            connection.close()
        for worker in workers:
            _end(worker)


def _run(connections: Sequence[Connection], seen: Seen) -> tuple[list[Share], bool]:
    for connection in connections:
        _received(connection, _START_SECONDS)  # it is connected
    beginning = time.monotonic() + _LEAD_SECONDS
    for connection in connections:
        connection.send(beginning)
    results: dict[Connection, Share] = {}
    progress = dict.fromkeys(connections, Progress(0, 0, 0, 0))
    interrupted = False
    while len(results) < len(connections):
        try:
            _receive(connections, results, progress)
            seen(time.monotonic() - beginning, list(progress.values()))
        except KeyboardInterrupt:
            interrupted = True
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.send(None)
    return [results[connection] for connection in connections], interrupted


def _receive(
    connections: Sequence[Connection], results: dict[Connection, Share], progress: dict[Connection, Progress]
) -> None:
    """Receive messages of processes during the interval of one progress report."""
    for ready in wait([one for one in connections if one not in results], _PROGRESS_SECONDS):
        message = _received(ready, 0)  # type: ignore[arg-type]
        if isinstance(message, Share):
            results[ready] = message  # type: ignore[index]
        else:
            progress[ready] = message  # type: ignore[index]


def _received(connection: Connection, seconds: float) -> Any:
    """Return the next message of a process. Raises ProcessDied and Unreachable."""
    try:
        if not connection.poll(seconds):
            raise ProcessDied(f"a load process did not start within {seconds:g} seconds")
        message = connection.recv()
    except (EOFError, OSError) as error:
        raise ProcessDied("a load process ended before its results") from error
    if isinstance(message, Unreachable):
        raise message
    return message


def _end(worker: Any) -> None:
    if worker.pid is None:
        return
    worker.join(_JOIN_SECONDS)
    if worker.is_alive():
        worker.kill()
        worker.join()


def _work(connection: Connection, target: Target, load: Load, share: tuple[int, int]) -> None:
    """Run a load process: the entry point of the child."""
    # Ctrl-C reaches all processes of a terminal; the main process decides for the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(_Worker(connection, target, load).run(share))
    except Unreachable as error:
        connection.send(error)


class _Worker:
    """A running load process."""

    def __init__(self, connection: Connection, target: Target, load: Load) -> None:
        self._connection = connection
        self._target = target
        self._load = load
        self._beginning = 0.0
        self._lags: array[float] = array("d")

    async def run(self, share: tuple[int, int]) -> None:
        """Connect, wait for the start command, run the share, and send the results."""
        client = open_client(self._target, self._clock)
        await client.describe()
        self._connection.send("connected")
        self._beginning = self._connection.recv()
        driver = Driver(client, self._load, share, self._clock)
        await asyncio.sleep(-self._clock())
        used = time.process_time()
        await self._drive(driver)
        result = Share(driver.records, self._clock(), time.process_time() - used, self._lags)
        await client.close()
        self._connection.send(driver.progress)
        self._connection.send(result)

    def _clock(self) -> float:
        return time.monotonic() - self._beginning

    async def _drive(self, driver: Driver) -> None:
        driving = asyncio.create_task(driver.run())
        background = [asyncio.create_task(self._probe()), asyncio.create_task(self._report_progress(driver))]
        loop = asyncio.get_running_loop()
        # After the start command the pipe carries only the stop command, or its end with the main process.
        loop.add_reader(self._connection.fileno(), self._stop, driving)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await driving
        finally:
            loop.remove_reader(self._connection.fileno())
            for task in background:
                task.cancel()

    def _stop(self, driving: "asyncio.Task[None]") -> None:
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        driving.cancel()

    async def _probe(self) -> None:
        while True:
            expected = self._clock() + _PROBE_SECONDS
            await asyncio.sleep(_PROBE_SECONDS)
            self._lags.append(max(0.0, self._clock() - expected))

    async def _report_progress(self, driver: Driver) -> None:
        while True:
            self._connection.send(driver.progress)
            await asyncio.sleep(_PROGRESS_SECONDS)
