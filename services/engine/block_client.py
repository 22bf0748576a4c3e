"""The engine's stream to the KV manager: its block manager over the wire.

The stream lives on the event loop, and the replica of the pool with it; the engine's own thread sends and receives
through two queues. What the stream brings (answers, a loss, a new stream) is kept in one queue in order. The stream is
opened again only when the engine's thread has received the loss: then all that it ever sent is in the replica.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from blocks import Reattached, Step, StepResult
from kvmanager import PoolSpec
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc as pb_grpc
from services.engine.replica import PoolDiverged, Replica
from services.runtime import transport
from services.runtime.tls import ClientTLS
from services.wire.attach import register_message
from services.wire.report import pages_of
from services.wire.step import step_message
from services.wire.step_result import result_of

# Without a sign that the manager reads or adopts the report.
_REGISTER_SECONDS = 10.0
_FIRST_RETRY_SECONDS = 0.1
_LONGEST_RETRY_SECONDS = 2.0
# A manager whose books differ for another reason than an accident will differ again.
_MOST_DIFFERENCES = 10
# Of these, trying again cannot help: another incarnation owns the pool, or the manager does not speak this contract.
_FINAL = (grpc.StatusCode.ABORTED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)

log = logging.getLogger("quire.engine")

_Outgoing = asyncio.Queue[pb.PoolRequest | None]

_NONE_TRACED: Mapping[str, str] = {}


@dataclass(frozen=True)
class _Attached:
    """A stream is there. It has a queue of its own, so that what was meant for an older one never enters it.

    `again` describes the pool, where the stream replaces another.
    """

    outgoing: _Outgoing
    again: Reattached | None


class _Lost:
    """The stream broke."""


class AttachRefused(Exception):
    """The KV manager will not have this engine; the message says why."""


class BlockClient:
    """Implements `blocks.BlockManager` for the engine's thread; `run` keeps the stream on the event loop."""

    def __init__(
        self,
        address: str,
        spec: PoolSpec,
        wake: Callable[[], None],
        tls: ClientTLS | None = None,
        trace_parents: Mapping[str, str] = _NONE_TRACED,
    ) -> None:
        """Describe the pool. `wake` is called, on the event loop, whenever `receive` has something new.

        The stream is encrypted where `tls` says whom to trust. `trace_parents`, which the engine's thread changes, has
        the requests that are traced.
        """
        self._address = address
        self._tls = tls
        self._replica = Replica(spec)
        self._wake = wake
        self._trace_parents = trace_parents
        self._loop = asyncio.get_running_loop()
        self._incoming: deque[StepResult | _Attached | _Lost] = deque()
        self._outgoing: _Outgoing = asyncio.Queue()
        self._sending: _Outgoing | None = None
        self._loss_received = asyncio.Event()
        self._sessions = 0
        self._differences = 0
        self.attached = asyncio.Event()
        self.detached = asyncio.Event()

    # Called by the engine's thread.

    @property
    def sessions(self) -> int:
        """How often the pool was attached."""
        return self._sessions

    @property
    def ready(self) -> bool:
        """Whether a Step can be sent now."""
        return self._sending is not None

    def send(self, step: Step) -> None:
        """Send a Step; its answer is lost with the stream if that breaks."""
        assert self._sending is not None, "nothing is sent unless it is ready"
        message = step_message(step)
        if self._trace_parents:
            for allocate in message.step.allocates:
                allocate.trace_parent = self._trace_parents.get(allocate.request_id, "")
        self._loop.call_soon_threadsafe(self._post, self._sending, step, message)

    def receive(self) -> StepResult | None:
        """Return the next answer. Raises Reattached when a broken stream was replaced."""
        while self._incoming:
            match self._incoming.popleft():
                case StepResult() as result:
                    return result
                case _Lost():
                    self._sending = None
                    self._loop.call_soon_threadsafe(self._loss_received.set)
                case _Attached(outgoing, again):
                    self._sending = outgoing
                    if again:
                        raise again
        return None

    # Called on the event loop.

    async def run(self) -> None:
        """Attach, and attach again after each loss, until cancelled.

        Raises AttachRefused where a retry cannot help. A manager whose pool diverged receives the engine's pool when
        the stream attaches again; one that keeps diverging raises PoolDiverged.
        """
        retry_seconds = _FIRST_RETRY_SECONDS
        while True:
            was_attached = await self._attach_once()
            if was_attached:
                await self._loss_received.wait()
            retry_seconds = _FIRST_RETRY_SECONDS if was_attached else min(retry_seconds * 2, _LONGEST_RETRY_SECONDS)
            await asyncio.sleep(retry_seconds)

    def close(self) -> None:
        """Half-close the stream after what was sent: the KV manager drops the pool."""
        self._outgoing.put_nowait(None)

    async def _attach_once(self) -> bool:
        """Hold one stream until it ends; return whether it was attached."""
        self._outgoing = asyncio.Queue()
        try:
            async with transport.channel(self._address, tls=self._tls) as channel:
                await self._converse(pb_grpc.KVManagerStub(channel))
        except grpc.aio.AioRpcError as error:
            # A stream that was attached is aborted when another replaced it: a newer incarnation's, which will refuse
            # this one when it tries again, or this engine's own earlier attempt, given up here and come late there.
            replaced = error.code() is grpc.StatusCode.ABORTED and self.attached.is_set()
            if error.code() in _FINAL and not replaced:
                raise AttachRefused(f"the KV manager at {self._address} refused the pool: {error.details()}") from error
            log.warning("KV manager at %s: %s", self._address, error.details())
        except TimeoutError:
            log.warning("KV manager at %s gave no sign within %s s", self._address, _REGISTER_SECONDS)
        finally:
            self.close()  # grpc goes on waiting for requests after the stream broke, and would for ever
            was_attached = self.attached.is_set()
            if was_attached:
                self.attached.clear()
                self.detached.set()
                self._loss_received.clear()
                self._put(_Lost())
        return was_attached

    async def _converse(self, stub: "pb_grpc.KVManagerAsyncStub") -> None:
        call = stub.Attach(self._requests())
        first = await _registered(call)
        if not isinstance(first, pb.PoolResponse):
            await call.code()
            return
        session = {"session": first.registered.session, "engine": self._replica.spec.engine_id}
        log.info("attached to the KV manager at %s", self._address, extra=session)
        self.detached.clear()
        self.attached.set()
        replica = self._replica
        again = Reattached(replica.available_blocks, replica.available_host_blocks, replica.pins)
        self._put(_Attached(self._outgoing, again if self._sessions else None))
        self._sessions += 1
        while isinstance(response := await call.read(), pb.PoolResponse):
            if not self._take(result_of(response.result)):
                break

    def _take(self, result: StepResult) -> bool:
        """Hand an answer on; return whether the manager's books are the engine's."""
        try:
            self._replica.apply_result(result)
        except PoolDiverged as differs:
            self._differences += 1
            if self._differences > _MOST_DIFFERENCES:
                raise
            log.error("%s; attaching again, with the engine's books", differs)
            self._put(differs.own)
            return False
        self._put(result)
        return True

    async def _requests(self) -> AsyncIterator[pb.PoolRequest]:
        yield pb.PoolRequest(register=register_message(self._replica.spec))
        for page in pages_of(self._replica.report()):
            yield pb.PoolRequest(report=page)
        outgoing = self._outgoing
        while (request := await outgoing.get()) is not None:
            yield request

    def _post(self, outgoing: _Outgoing, step: Step, message: pb.PoolRequest) -> None:
        self._replica.add_in_flight(step)
        outgoing.put_nowait(message)

    def _put(self, incoming: StepResult | _Attached | _Lost) -> None:
        self._incoming.append(incoming)
        self._wake()


async def _registered(call: "grpc.aio.StreamStreamCall[pb.PoolRequest, pb.PoolResponse]") -> Any:
    """Return the first answer that is no sign of progress. Raises TimeoutError where neither comes for a while."""
    while True:
        async with asyncio.timeout(_REGISTER_SECONDS):
            response = await call.read()
        if not isinstance(response, pb.PoolResponse) or not response.HasField("attaching"):
            return response
