"""The engine's stream to the KV manager: its block manager over the wire.

The stream lives on the event loop; the engine's own thread sends and receives through two queues. What the stream
tells (answers, a loss, a new pool) is kept in one queue in order, so the engine's thread sees a loss before anything
that came after it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from engine.blocks import PoolLost, Step, StepResult
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc as pb_grpc
from services import transport
from services.engine.block_codec import result_of, step_message

_REGISTER_SECONDS = 10.0
_FIRST_RETRY_SECONDS = 0.1
_LONGEST_RETRY_SECONDS = 2.0
# Of these, trying again cannot help: another incarnation owns the pool, or the manager does not speak this contract.
_FINAL = (grpc.StatusCode.ABORTED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)

log = logging.getLogger("quire.engine")

_Outgoing = asyncio.Queue[pb.PoolRequest | None]


@dataclass(frozen=True)
class _Attached:
    """A stream is there. It has a queue of its own, so that what was meant for an older one never enters it."""

    outgoing: _Outgoing


class _Lost:
    """The stream broke."""


class PoolRefused(Exception):
    """The KV manager will not have this engine; the message says why."""


class BlockLink:
    """Implements `engine.blocks.BlockManager` for the engine's thread; `run` keeps the stream on the event loop."""

    def __init__(self, address: str, register: pb.Register, wake: Callable[[], None]) -> None:
        """Describe the pool. `wake` is called, on the event loop, whenever `receive` has something new."""
        self._address = address
        self._register = register
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._incoming: deque[StepResult | _Attached | _Lost] = deque()
        self._outgoing: _Outgoing = asyncio.Queue()
        self._sending: _Outgoing | None = None
        self.attached = asyncio.Event()
        self.detached = asyncio.Event()

    # Called by the engine's thread.

    @property
    def ready(self) -> bool:
        """Whether a Step can be sent now."""
        return self._sending is not None

    def send(self, step: Step) -> None:
        """Send a Step; lost with the stream if that breaks."""
        assert self._sending is not None, "nothing is sent unless it is ready"
        self._loop.call_soon_threadsafe(self._sending.put_nowait, step_message(step))

    def receive(self) -> StepResult | None:
        """Return the next answer. Raises PoolLost once for each broken stream."""
        while self._incoming:
            incoming = self._incoming.popleft()
            if isinstance(incoming, StepResult):
                return incoming
            self._sending = incoming.outgoing if isinstance(incoming, _Attached) else None
            if isinstance(incoming, _Lost):
                raise PoolLost
        return None

    # Called on the event loop.

    async def run(self) -> None:
        """Attach, and attach again after each loss, until cancelled. Raises PoolRefused when there is no use."""
        retry_seconds = _FIRST_RETRY_SECONDS
        while True:
            was_attached = await self._attach_once()
            retry_seconds = _FIRST_RETRY_SECONDS if was_attached else min(retry_seconds * 2, _LONGEST_RETRY_SECONDS)
            await asyncio.sleep(retry_seconds)

    def close(self) -> None:
        """Half-close the stream after what was sent: the KV manager drops the pool."""
        self._outgoing.put_nowait(None)

    async def _attach_once(self) -> bool:
        """Hold one stream until it ends; return whether it was attached."""
        self._outgoing = asyncio.Queue()
        try:
            async with transport.channel(self._address) as channel:
                await self._converse(pb_grpc.KVManagerStub(channel))
        except grpc.aio.AioRpcError as error:
            if error.code() in _FINAL:
                raise PoolRefused(f"the KV manager at {self._address} refused the pool: {error.details()}") from error
            log.warning("KV manager at %s: %s", self._address, error.details())
        except TimeoutError:
            log.warning("KV manager at %s did not answer within %s s", self._address, _REGISTER_SECONDS)
        finally:
            self.close()  # grpc goes on waiting for requests after the stream broke, and would for ever
            was_attached = self.attached.is_set()
            if was_attached:
                self.attached.clear()
                self.detached.set()
                self._tell(_Lost())
        return was_attached

    async def _converse(self, stub: "pb_grpc.KVManagerAsyncStub") -> None:
        call = stub.Attach(self._requests())
        async with asyncio.timeout(_REGISTER_SECONDS):
            first = await call.read()
        if not isinstance(first, pb.PoolResponse):
            await call.code()
            return
        log.info("attached to the KV manager at %s, session %s", self._address, first.registered.session)
        self.detached.clear()
        self.attached.set()
        self._tell(_Attached(self._outgoing))
        while isinstance(response := await call.read(), pb.PoolResponse):
            self._tell(result_of(response.result))

    async def _requests(self) -> AsyncIterator[pb.PoolRequest]:
        yield pb.PoolRequest(register=self._register)
        yield pb.PoolRequest(report=pb.ReportPage(last=True))
        outgoing = self._outgoing
        while (request := await outgoing.get()) is not None:
            yield request

    def _tell(self, incoming: StepResult | _Attached | _Lost) -> None:
        self._incoming.append(incoming)
        self._wake()
