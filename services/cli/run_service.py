"""Runs one service as a process: health, reflection, signals, drain."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.service import Service

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

log = logging.getLogger("quire")


def run_service(label: str, prepare: Callable[[], Callable[[], Service]]) -> int:
    """Run a service until SIGTERM or Ctrl-C, and return the exit status; a failure is told in one line.

    `prepare` does what may take long and must be interruptible: it fetches and imports what the service needs. What it
    returns makes the service, and is called on the event loop.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the event loop takes over
    try:
        asyncio.run(_run(label, prepare()))
    except KeyboardInterrupt:
        log.info("%s was stopped before it began", label)
    except BaseException as error:
        cause = _first_cause(error)
        log.error("%s cannot go on: %s: %s", label, type(cause).__name__, _one_line(cause))
        return 1
    return 0


async def _run(label: str, make: Callable[[], Service]) -> None:
    asked_to_stop = _stop_signals()
    service = make()
    followers = [asyncio.create_task(_serve_health(service))]
    _add_reflection(service)
    try:
        log.info("%s listens on %s", label, await service.start())
        followers.append(asyncio.create_task(_announce(label, service)))
        await _work(service, asked_to_stop)
    finally:
        for follower in followers:
            follower.cancel()
        await service.stop()


async def _work(service: Service, asked_to_stop: asyncio.Event) -> None:
    work = asyncio.create_task(service.run())
    stop = asyncio.create_task(asked_to_stop.wait())
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
        for task in (work, stop):
            task.cancel()
        await asyncio.gather(work, stop, return_exceptions=True)


def _stop_signals() -> asyncio.Event:
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    return asked


async def _serve_health(service: Service) -> None:
    """Answer "" with SERVING while the process lives, and the service's name with its readiness."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, service.server)
    await servicer.set("", _SERVING)
    async for ready in service.readiness.changes():
        await servicer.set(service.name, _SERVING if ready else _NOT_SERVING)


def _add_reflection(service: Service) -> None:
    names = (service.name, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, service.server)


async def _announce(label: str, service: Service) -> None:
    async for ready in service.readiness.changes():
        log.info("%s is %s", label, "ready" if ready else "not ready")


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _one_line(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return " ".join(str(error).split())
