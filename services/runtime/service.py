"""What every service is, so that one main can run any of them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc


class Readiness:
    """Whether a service can do its work now; whoever watches hears of each change."""

    def __init__(self) -> None:
        self._ready = False
        self._retired = False
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """The present state."""
        return self._ready

    @property
    def retired(self) -> bool:
        """Whether it is not ready for good."""
        return self._retired

    def set(self, ready: bool) -> None:
        """Change the state; once retired, it stays not ready."""
        ready = ready and not self._retired
        if ready != self._ready:
            self._ready = ready
            self._changed.set()
            self._changed = asyncio.Event()

    def retire(self) -> None:
        """Be not ready for good."""
        self._retired = True
        self.set(False)

    async def changes(self) -> AsyncIterator[bool]:
        """Yield the present state, then each new one; states that came and went meanwhile are skipped."""
        told: bool | None = None
        while True:
            changed = self._changed
            if self._ready != told:
                told = self._ready
                yield told
            else:
                await changed.wait()

    async def wait(self) -> None:
        """Return as soon as the service is ready."""
        async for ready in self.changes():
            if ready:
                return


class Service(Protocol):
    """A gRPC server with a life: started, ready, drained, stopped, in this order."""

    name: str
    server: grpc.aio.Server
    readiness: Readiness

    async def start(self) -> str:
        """Listen and begin to work; return the address. Readiness follows when it is reached."""

    async def run(self) -> None:
        """Work until cancelled; raise when the service cannot go on."""

    async def drain(self) -> None:
        """Take nothing new, and return when what was taken has ended, or the grace time is over."""

    async def stop(self) -> None:
        """Close everything."""
