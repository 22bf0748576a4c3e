"""The engine's stream to the KV manager: its block manager over the wire.

The stream and the replica of the pool belong to the event loop. The engine's thread sends and receives through two
queues. Answers, disconnects and new streams are queued in order. The client reconnects only after the engine's thread
has received the disconnect, so that the replica contains every block step that was sent.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from blocks import Reattached, Reset, Step, StepResult
from engine.kept.seal_writer import SealChanges, SealWriter
from kvmanager import PoolReport, PoolSpec
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc as pb_grpc
from services.engine.events.pool_events import Follow
from services.engine.kept.boot_id import boot_id
from services.engine.kept.origin_rows import OriginRows
from services.engine.replica import PoolDiverged, Replica
from services.runtime import transport
from services.runtime.slices import run_in_slices
from services.runtime.tls import ClientTLS
from services.wire.attach import register_message
from services.wire.features import MANAGER_FEATURES, without_features
from services.wire.report import pages_of
from services.wire.step import step_message
from services.wire.step_result import result_of

# Maximum time without a message while the manager adopts the report.
_REGISTER_SECONDS = 10.0
_FIRST_RETRY_SECONDS = 0.1
_MAX_RETRY_SECONDS = 2.0
# A manager that diverges this often does so for a reason that attaching again does not remove.
_MAX_DIVERGENCES = 10
# A retry cannot help: the manager does not support this contract.
_FINAL = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
# Refusals in a row, because another incarnation owns the pool. One may be for an earlier attempt of this engine, which
# timed out here and was late there.
_MAX_ABORTED = 2

_PROCESS = Path("/proc/self/stat")
_START_FIELD = 19  # of those behind the program's name
# The feature of a manager that can withhold blocks for its engine.
_CONDEMNS = "step.condemns"

log = logging.getLogger("quire.engine")

_Outgoing = asyncio.Queue[pb.PoolRequest | None]

Connect = Callable[[], AbstractAsyncContextManager[grpc.aio.Channel]]

_NO_TRACE_PARENTS: Mapping[str, str] = {}


@dataclass(frozen=True)
class _NewStream:
    """A new stream, with its own queue, so that block steps for an older stream never enter it.

    `reattached` describes the pool if the stream replaces another, or if the pool began with kept blocks. `changes` are
    those of block steps that were not answered. `missing` has the fields that the manager lacks.
    """

    outgoing: _Outgoing
    reattached: Reattached | None
    changes: Sequence[SealChanges]
    missing: Collection[str]


@dataclass(frozen=True)
class _Answer:
    """An answer, and what it changes in the seals."""

    result: StepResult
    changes: Sequence[SealChanges]


class _Disconnect:
    """The stream was disconnected."""


class SealedBlocks(NamedTuple):
    """The writer of seals, and what a kept memory contained at the start, None if the memory ends with its process.

    `rows` of kept memory have what its keys are hashes of, None without KV events.
    """

    seals: SealWriter
    report: PoolReport | None = None
    rows: OriginRows | None = None


class AttachRefused(Exception):
    """The KV manager refused this engine; the message has its reason."""


class BlockClient:
    """Implements `blocks.BlockManager` for the engine's thread; `run` keeps the stream open on the event loop."""

    def __init__(
        self,
        address: str,
        spec: PoolSpec,
        wake: Callable[[], None],
        tls: ClientTLS | None = None,
        trace_parents: Mapping[str, str] = _NO_TRACE_PARENTS,
        connect: Connect | None = None,
        needs: Collection[str] = (),
        sealed: SealedBlocks | None = None,
        follow: Follow | None = None,
    ) -> None:
        """Describe the pool. `wake` is called on the event loop whenever `receive` has a new item.

        `needs` has the features that the manager must have: names of services.wire.features.MANAGER_FEATURES. With
        `tls`, the stream is encrypted. `trace_parents` maps traced requests to their trace parents; the engine's
        thread changes it. `connect` opens a channel in place of gRPC's. `sealed` has the blocks of a memory with
        seals, which are written by the engine's thread, in `receive`, before an answer is used. `follow` is called with
        the pool. Raises InvalidReport if seals contradict each other.
        """
        self._address = address
        self._connect = connect or (lambda: transport.channel(address, tls=tls))
        self._seals = sealed.seals if sealed else None
        report, rows = (sealed.report, sealed.rows) if sealed else (None, None)
        self.replica = Replica(spec, report, seals=sealed is not None, follow=follow, rows=rows)
        self._wake = wake
        self._trace_parents = trace_parents
        self._needs = needs
        self._missing: Collection[str] = ()
        self._loop = asyncio.get_running_loop()
        self._incoming: deque[_Answer | _NewStream | _Disconnect] = deque()
        self._outgoing: _Outgoing = asyncio.Queue()
        self._sending: _Outgoing | None = None
        self._disconnect_received = asyncio.Event()
        self._sessions = 0
        self._divergences = 0
        self._aborted = 0  # refusals in a row because of another incarnation
        self.attached = asyncio.Event()
        self.detached = asyncio.Event()

    # Called by the engine's thread.

    @property
    def sessions(self) -> int:
        """Number of times that the pool was attached."""
        return self._sessions

    @property
    def ready(self) -> bool:
        """Return True if a block step can be sent now."""
        return self._sending is not None

    @property
    def has_answers(self) -> bool:
        """Whether `receive` has something to return or to raise."""
        return bool(self._incoming)

    def send(self, step: Step) -> None:
        """Send a block step; a disconnect loses its answer."""
        assert self._sending is not None, "the stream is ready"
        if step.condemns and _CONDEMNS in self._missing:
            # No hit finds the blocks any more; they may be granted again, and are written to before they are read.
            step = replace(step, condemns=(), pins=(*step.pins, Reset()))
        message = step_message(step)
        if self._missing:
            without_features(message, self._missing)
        if self._trace_parents:
            for allocate in message.step.allocates:
                allocate.trace_parent = self._trace_parents.get(allocate.request_id, "")
        self._loop.call_soon_threadsafe(self._post, self._sending, step, message)

    def receive(self) -> StepResult | None:
        """Return the next answer. Raises Reattached when a broken stream was replaced."""
        while self._incoming:
            match self._incoming.popleft():
                case _Answer(result, changes):
                    self._write_seals(changes)
                    return result
                case _Disconnect():
                    self._sending = None
                    self._loop.call_soon_threadsafe(self._disconnect_received.set)
                case _NewStream(outgoing, reattached, changes, missing):
                    self._write_seals(changes)
                    self._sending, self._missing = outgoing, missing
                    if reattached:
                        raise reattached
        return None

    def _write_seals(self, changes: Iterable[SealChanges]) -> None:
        if self._seals is not None:
            for one in changes:
                self._seals.apply(one)

    # Called on the event loop.

    @property
    def usage(self) -> float:
        """Share of the pool's device blocks that are held, 0 to 1, in the kind that has the least room."""
        return self.replica.pool.usage

    async def run(self) -> None:
        """Attach, and attach again after each disconnect, until cancelled.

        Raises AttachRefused if a retry cannot help. If the manager's pool diverges, the client attaches again and sends
        the engine's pool. Raises PoolDiverged after too many of these.
        """
        retry_seconds = _FIRST_RETRY_SECONDS
        while True:
            was_attached = await self._attach_once()
            if was_attached:
                await self._disconnect_received.wait()
            retry_seconds = _FIRST_RETRY_SECONDS if was_attached else min(retry_seconds * 2, _MAX_RETRY_SECONDS)
            await asyncio.sleep(retry_seconds)

    def close(self) -> None:
        """Half-close the stream after the queued block steps: the KV manager drops the pool."""
        self._outgoing.put_nowait(None)

    async def _attach_once(self) -> bool:
        """Keep one stream open until it ends; return True if it was attached."""
        self._outgoing = asyncio.Queue()
        try:
            async with self._connect() as channel:
                await self._exchange(pb_grpc.KVManagerStub(channel))
        except grpc.aio.AioRpcError as error:
            # An attached stream is aborted when another one replaces it. If that is a newer incarnation, the next
            # attempts are refused.
            aborted = error.code() is grpc.StatusCode.ABORTED
            self._aborted = self._aborted + 1 if aborted and not self.attached.is_set() else 0
            if error.code() in _FINAL or self._aborted >= _MAX_ABORTED:
                raise AttachRefused(f"the KV manager at {self._address} refused the pool: {error.details()}") from error
            log.warning("KV manager at %s: %s", self._address, error.details())
        except TimeoutError:
            log.warning("KV manager at %s sent no message within %s s", self._address, _REGISTER_SECONDS)
        finally:
            self.close()  # grpc would wait for requests forever after the stream broke
            was_attached = self.attached.is_set()
            if was_attached:
                self.attached.clear()
                self.detached.set()
                self._disconnect_received.clear()
                self._put(_Disconnect())
        return was_attached

    async def _exchange(self, stub: "pb_grpc.KVManagerAsyncStub") -> None:
        call = stub.Attach(self._requests())
        first = await _registered(call)
        if not isinstance(first, pb.PoolResponse):
            await call.code()
            return
        features = frozenset(first.registered.features)
        if lacking := [name for name in self._needs if name not in features]:
            remedy = "; start the engine with --kinds off until it is new" if "register.kinds" in lacking else ""
            raise AttachRefused(
                f"the KV manager at {self._address} lacks {', '.join(lacking)}: it is of an older version{remedy}"
            )
        missing = [name for name in MANAGER_FEATURES if name not in features]
        session = {"session": first.registered.session, "engine": self.replica.spec.engine_id}
        log.info("attached to the KV manager at %s", self._address, extra=session)
        self.detached.clear()
        self.attached.set()
        replica = self.replica
        available = replica.available_blocks, replica.available_host_blocks
        reattached = Reattached(*available, replica.pins, replica.available_in_windows)
        anew = reattached if self._sessions or replica.adopted else None
        self._put(_NewStream(self._outgoing, anew, replica.take_changes(), missing))
        self._sessions += 1
        while isinstance(response := await call.read(), pb.PoolResponse):
            if not self._receive_result(result_of(response.result)):
                break

    def _receive_result(self, result: StepResult) -> bool:
        """Queue an answer; return True if the manager's pool matches the replica."""
        try:
            self.replica.apply_result(result)
        except PoolDiverged as diverged:
            self._divergences += 1
            if self._divergences > _MAX_DIVERGENCES:
                raise
            log.error("%s; attaching again with the engine's pool", diverged)
            self._put(_Answer(diverged.own, self.replica.take_changes()))
            return False
        self._put(_Answer(result, self.replica.take_changes()))
        return True

    async def _requests(self) -> AsyncIterator[pb.PoolRequest]:
        spec = self.replica.spec
        if not spec.boot_id:
            spec = replace(spec, **start_after_boot())
        yield pb.PoolRequest(register=register_message(spec, tuple(self._needs)))
        report = await run_in_slices(self.replica.reporting())
        for page in pages_of(report):
            yield pb.PoolRequest(report=page)
        await run_in_slices(report.dismantle())
        outgoing = self._outgoing
        while (request := await outgoing.get()) is not None:
            yield request

    def _post(self, outgoing: _Outgoing, step: Step, message: pb.PoolRequest) -> None:
        self.replica.add_in_flight(step)
        outgoing.put_nowait(message)

    def _put(self, incoming: _Answer | _NewStream | _Disconnect) -> None:
        self._incoming.append(incoming)
        self._wake()


async def _registered(call: "grpc.aio.StreamStreamCall[pb.PoolRequest, pb.PoolResponse]") -> Any:
    """Return the first response that is not a progress message. Raises TimeoutError after a period without either."""
    while True:
        async with asyncio.timeout(_REGISTER_SECONDS):
            response = await call.read()
        if not isinstance(response, pb.PoolResponse) or not response.HasField("attaching"):
            return response


def start_after_boot() -> dict[str, Any]:
    """Return the machine's boot id and this process's start in nanoseconds since that boot; nothing if unknown."""
    try:
        # The name of the program, in parentheses, may contain spaces.
        ticks = int(_PROCESS.read_text().rpartition(")")[2].split()[_START_FIELD])
    except (OSError, ValueError, IndexError):
        return {}
    boot = boot_id()
    return {"boot_id": boot, "started_after_boot": ticks * 10**9 // os.sysconf("SC_CLK_TCK")} if boot else {}
