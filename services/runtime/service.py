"""The interface of a service, and its readiness."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import grpc


class Readiness:
    """Whether a service is ready; watchers receive each change."""

    def __init__(self) -> None:
        self._ready = False
        self._retired = False
        self.notes: Sequence[str] = ()
        """What is wrong although the service works: a line each, for operators."""
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """The current state."""
        return self._ready

    @property
    def retired(self) -> bool:
        """Return True if the service will not become ready again."""
        return self._retired

    def set(self, ready: bool) -> None:
        """Change the state; a retired service stays not ready."""
        ready = ready and not self._retired
        if ready != self._ready:
            self._ready = ready
            self._changed.set()
            self._changed = asyncio.Event()

    def retire(self) -> None:
        """Become not ready for good."""
        self._retired = True
        self.set(False)

    async def changes(self) -> AsyncIterator[bool]:
        """Yield the current state, then each new one; intermediate states may be skipped."""
        yielded: bool | None = None
        while True:
            changed = self._changed
            if self._ready != yielded:
                yielded = self._ready
                yield yielded
            else:
                await changed.wait()

    async def wait(self) -> None:
        """Return as soon as the service is ready."""
        async for ready in self.changes():
            if ready:
                return


class Service(Protocol):
    """A gRPC server with a lifecycle: start, run, drain, stop, in this order."""

    name: str
    server: grpc.aio.Server
    readiness: Readiness

    async def start(self) -> str:
        """Listen, and return the address. The service becomes ready later."""

    async def run(self) -> None:
        """Run until cancelled; raise the error that stopped the service."""

    async def drain(self) -> None:
        """Reject new requests, and return when running ones have ended or the grace time is over."""

    async def stop(self) -> None:
        """Close all resources."""
