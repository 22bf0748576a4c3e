"""Runs one service as a process: health, reflection, signals, drain."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NoReturn, Protocol

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import Metric, PlatformCollector, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from services.runtime import transport
from services.runtime.child_process import READY_DESCRIPTOR, STOP_WITH_STDIN
from services.runtime.health import HealthServicer
from services.runtime.logs.records import LogWriter, logging_to_stderr
from services.runtime.metrics.certificates import show_certificates
from services.runtime.metrics.page import Exposition
from services.runtime.metrics.server import metrics_server
from services.runtime.service import Readiness, Service

_LAST_SECONDS = 1.0
_SIGNAL_BYTES = 4096
# Twice the maximum of gRPC's connections; the default limit is often lower.
_OPEN_FILES = 8192

_OWN_PACKAGES = ("services", "engine", "kvmanager", "blocks")
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = logging.getLogger("quire")


class LogSettings(Protocol):
    """Settings of a service's log."""

    @property
    def log_format(self) -> str:
        """See services.runtime.logs.records.FORMATS."""

    @property
    def log_level(self) -> str:
        """See services.runtime.logs.records.LEVELS."""


def run_service(
    label: str, settings: LogSettings, metrics: Exposition, prepare: Callable[[], Callable[[], Service]]
) -> int:
    """Run a service until SIGTERM or Ctrl-C, and return the exit status; a failure is logged as one line.

    `prepare` does the slow, interruptible part: it downloads and imports. It returns the constructor of the service,
    which is called on the event loop.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # otherwise each counter has a second series
    show_certificates(settings, metrics.registry)
    with logging_to_stderr(label, settings.log_format, settings.log_level) as logs:
        metrics.registry.register(_DroppedLines(logs))
        return _run_logged(label, settings, metrics, prepare)


class _DroppedLines(Collector):
    """Counts the dropped lines of the log."""

    def __init__(self, logs: LogWriter) -> None:
        self._logs = logs

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "quire_log_lines_dropped", "Lines dropped because the log is not read fast enough.", self._logs.dropped
        )


def _run_logged(
    label: str, settings: LogSettings, metrics: Exposition, prepare: Callable[[], Callable[[], Service]]
) -> int:
    _allow_open_files()
    for number in _STOP_SIGNALS:  # until the event loop takes over
        signal.signal(number, _leave)
    try:
        make = _without_garbage_collection(prepare)
        with asyncio.Runner(loop_factory=transport.ServiceLoop) as runner:
            runner.run(_run(label, make, metrics))
    except KeyboardInterrupt:
        log.info("%s was stopped before it started", label)
        return 0
    except BaseException as error:
        cause = _first_cause(error)
        stack = cause if settings.log_format == "json" or settings.log_level == "debug" else None
        log.error("%s failed: %s", label, _one_line(cause), exc_info=stack)
        return 1
    finally:
        for number in _STOP_SIGNALS:  # otherwise they could kill the interpreter during its exit
            signal.signal(number, signal.SIG_IGN)
        gc.collect()  # at exit, gRPC would wait 2 s for credentials that are still referenced
    return 0


def _without_garbage_collection(prepare: Callable[[], Callable[[], Service]]) -> Callable[[], Service]:
    """Call `prepare`, and exclude everything it imports from garbage collection.

    Imported modules stay until the end. Collecting them would take an engine half a second at the start, and more at
    the end.
    """
    gc.disable()
    try:
        return prepare()
    finally:
        gc.freeze()
        gc.enable()


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _leave(*_: object) -> NoReturn:
    """Exit at once: nothing has to be closed yet, and the module being imported could swallow an exception."""
    os._exit(0)


async def _run(label: str, make: Callable[[], Service], metrics: Exposition) -> None:
    with _woken_by_signals():
        await _run_until_stopped(label, make, metrics)


@contextmanager
def _woken_by_signals() -> Iterator[None]:
    """Wake the event loop at each signal.

    Otherwise a signal that arrives just before the loop waits, or at another thread, is handled at the loop's next
    event, which an idle service may not have for long.
    """
    loop = asyncio.get_running_loop()
    readable, writable = socket.socketpair()
    with readable, writable:
        for end in (readable, writable):
            end.setblocking(False)
        loop.add_reader(readable, readable.recv, _SIGNAL_BYTES)
        signal.set_wakeup_fd(writable.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            loop.remove_reader(readable)


async def _run_until_stopped(label: str, make: Callable[[], Service], metrics: Exposition) -> None:
    asked_to_stop = _stop_signals()
    service = make()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(service.name, service.readiness), service.server)
    _add_reflection(service)
    async with _metrics_shown(label, metrics, service.readiness):
        try:
            address = await service.start()
            log.info("%s listens on %s", label, address)
            await _work(label, service, address, asked_to_stop)
        finally:
            await service.stop()
            await _wait_for_calls()


@asynccontextmanager
async def _metrics_shown(label: str, metrics: Exposition, readiness: Readiness) -> AsyncIterator[None]:
    if not metrics.address:
        yield
        return
    ProcessCollector(registry=metrics.registry)
    PlatformCollector(registry=metrics.registry)
    async with metrics_server(metrics, readiness) as url:
        log.info("%s shows its metrics at %s", label, url)
        yield


async def _wait_for_calls() -> None:
    """Wait until the handlers of aborted calls have ended, because gRPC prints tracebacks if they are cancelled."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_LAST_SECONDS)


async def _work(label: str, service: Service, address: str, asked_to_stop: asyncio.Event) -> None:
    work = asyncio.create_task(service.run())
    stop = asyncio.create_task(asked_to_stop.wait())
    announcer = asyncio.create_task(_announce(label, service, address))
    try:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            return
        drain = asyncio.create_task(service.drain())
        await asyncio.wait({work, drain}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in (work, stop, announcer):
            task.cancel()
        await asyncio.gather(work, stop, announcer, return_exceptions=True)


def _stop_signals() -> asyncio.Event:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(*_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(asked.set)

    for number in _STOP_SIGNALS:  # not with the loop's handlers, which end before the process does
        signal.signal(number, ask)
    if os.environ.get(STOP_WITH_STDIN):
        loop.add_reader(sys.stdin, lambda: _stop_at_end(loop, asked))
    return asked


def _stop_at_end(loop: asyncio.AbstractEventLoop, asked: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 1):
        loop.remove_reader(sys.stdin)
        asked.set()


def _add_reflection(service: Service) -> None:
    names = (service.name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, service.server)


async def _announce(label: str, service: Service, address: str) -> None:
    async for ready in service.readiness.changes():
        log.info("%s is %s", label, "ready" if ready else "not ready")
        if ready and (descriptor := os.environ.pop(READY_DESCRIPTOR, "")):
            with suppress(OSError):
                os.write(int(descriptor), f"{address}\n".encode())
                os.close(int(descriptor))


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _one_line(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    message = " ".join(str(error).split())
    # Quire's own errors have messages for people; the others need their class to be understood.
    own = type(error).__module__.partition(".")[0] in _OWN_PACKAGES and message
    return message if own else f"{type(error).__name__}: {message}"
