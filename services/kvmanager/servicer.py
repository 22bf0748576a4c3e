"""The KV manager's gRPC methods: read the request, call the core, write the response."""

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from kvmanager import KVManager, Session
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc as pb_grpc
from services.kvmanager.attach_handshake import USUAL, AttachHandshake, HandshakeLimits, Handshakes
from services.kvmanager.auditor import Auditor
from services.kvmanager.block_traces import BlockTraces
from services.kvmanager.leases import Leases
from services.kvmanager.ledger_reader import LedgerReader
from services.kvmanager.observer import PoolObserver
from services.kvmanager.recorder import OperationsRecorder
from services.runtime.errors import InvalidField, Overloaded
from services.runtime.slices import run_in_slices
from services.runtime.statuses import abort_on_error
from services.runtime.tracing.spans import Tracing
from services.wire.attach import registered_message
from services.wire.lookup import holdings_message, read_lookup
from services.wire.pool import block_map_message, pool_message, request_blocks_message, sequences_message
from services.wire.step_reader import read_step
from services.wire.step_result import result_message

_CANCEL_SECONDS = 0.05
# A block step's slices without a timed pause: the step of a long prompt has a few.
_FAST_SLICES = 4
_PAUSE_SECONDS = 0.001
_MAX_BLOCK_PAGE = 65536
_MAX_SEQUENCE_PAGE = 1000
_MAX_ENTRY_PAGE = 512

_Result = TypeVar("_Result")
# Units of work of a block step without a pause: about half a millisecond.
_STEP_WORK = 1000
# Each may have a message in memory.
_MAX_STREAMS = 256

log = logging.getLogger("quire.kvmanager")

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[bytes]


class KVManagerServicer(pb_grpc.KVManagerServicer):
    """The single writer of all pools: all calls run on one event loop, and the core never awaits."""

    def __init__(
        self,
        manager: KVManager,
        observer: PoolObserver,
        clock: Callable[[], float],
        lease_seconds: float,
        recorder: OperationsRecorder,
        tracing: Tracing | None = None,
        handshake_limits: HandshakeLimits = USUAL,
        step_work: int = _STEP_WORK,
    ) -> None:
        """Serve `manager`. `clock` is in seconds. Without `tracing`, block steps are not checked for traces.

        A block step is applied in slices of `step_work` units of work.
        """
        self._manager = manager
        self._recorder = recorder
        self._traces = BlockTraces(tracing) if tracing else None
        self._step_work = step_work
        self._streams = 0
        self._handshakes = Handshakes(manager, handshake_limits)
        self._waits: dict[Session, asyncio.Timeout] = {}  # of sessions that wait for a block step
        self._tasks: set[asyncio.Future[Any]] = set()
        self._leases = Leases(lease_seconds, self._is_attaching, self._expire)
        self._observer = observer
        self._clock = clock
        self._reader = LedgerReader(manager.ledger)
        self._auditor = Auditor(manager, clock)
        self._no_engine = asyncio.Event()
        self._no_engine.set()

    async def run(self) -> None:
        """Audit the pools until cancelled."""
        await self._auditor.run()

    async def wait_detached(self) -> None:
        """Wait until no engine is connected."""
        await self._no_engine.wait()

    async def Attach(  # type: ignore[override]  # noqa: N802
        self, requests: Requests, context: Context
    ) -> AsyncIterator[pb.PoolResponse]:
        """Attach an engine, then answer its block steps until the stream ends. A half-closed stream drops the pool.

        Requests are bytes: see `RawRequestInterceptor`.
        """
        async with abort_on_error(context):
            if self._streams >= _MAX_STREAMS:
                raise Overloaded(f"{self._streams} engines are attached, which is the maximum")
            async with aclosing(self._serve(requests)) as responses:
                async for response in responses:
                    yield response

    async def _serve(self, requests: Requests) -> AsyncGenerator[pb.PoolResponse]:
        handshake = AttachHandshake(self._manager, self._handshakes, self._clock)
        try:
            async with aclosing(handshake.progress(requests)) as messages:
                async for message in messages:
                    yield message
            session = self._begin(handshake)
        finally:
            if not self._recorder.records:
                self._run_in_background(handshake.report.dismantle())
        self._connect(session)
        try:
            yield registered_message(self._manager.epoch, session.number, self._leases.seconds)
            while (request := await self._next_step(session, requests)) is not None:
                yield pb.PoolResponse(result=await self._apply(session, request))
                self._reader.notify()  # after the answer is sent
            # A lost stream first ends like a half-closed one, and is cancelled a moment later.
            await asyncio.sleep(_CANCEL_SECONDS)
            self._drop(session)
        finally:
            self._disconnect(session)

    async def _next_step(self, session: Session, requests: Requests) -> bytes | None:
        """Return the next message, None at the end. Raises SessionReplaced as soon as the session is replaced."""
        self._manager.check_live(session)
        async with asyncio.timeout(None) as self._waits[session]:
            try:
                return await anext(requests, None)
            except asyncio.CancelledError:
                self._manager.check_live(session)
                raise
            finally:
                del self._waits[session]

    async def ListPools(self, _request: pb.ListPoolsRequest, _context: Context) -> pb.ListPoolsResponse:  # noqa: N802
        """List all pools."""
        return pb.ListPoolsResponse(pools=map(pool_message, self._manager.sessions()))

    async def GetPool(self, request: pb.GetPoolRequest, context: Context) -> pb.GetPoolResponse:  # noqa: N802
        """Describe one pool."""
        async with abort_on_error(context):
            return pb.GetPoolResponse(pool=pool_message(self._manager.session(request.engine_id)))

    async def GetBlockMap(  # noqa: N802
        self, request: pb.GetBlockMapRequest, context: Context
    ) -> pb.GetBlockMapResponse:
        """Return a page of one pool's blocks."""
        async with abort_on_error(context):
            if request.first_block < 0:
                raise InvalidField(f"first_block must be at least 0, not {request.first_block}", "first_block")
            count = _page_size(request.block_count, _MAX_BLOCK_PAGE, "block_count")
            state = self._manager.session(request.engine_id).pool.state.of_kind(request.kind)
            tier = state.host if request.tier == pb.TIER_HOST else state.device
            return await run_in_slices(block_map_message(tier, request.first_block or 1, count))

    async def ListSequences(  # noqa: N802
        self, request: pb.ListSequencesRequest, context: Context
    ) -> pb.ListSequencesResponse:
        """Return a page of one pool's sequences."""
        async with abort_on_error(context):
            size = _page_size(request.page_size, _MAX_SEQUENCE_PAGE, "page_size")
            after = _page_start(request.page_token)
            pool = self._manager.session(request.engine_id).pool
            found = await run_in_slices(pool.listing_sequences(after, size + 1))
            return await run_in_slices(sequences_message(pool, found, size))

    async def GetRequestBlocks(  # noqa: N802
        self, request: pb.GetRequestBlocksRequest, context: Context
    ) -> pb.GetRequestBlocksResponse:
        """Return the blocks of one request."""
        async with abort_on_error(context):
            if not request.request_id:
                raise InvalidField("request_id must not be empty", "request_id")
            entries = _page_size(request.entry_count, _MAX_ENTRY_PAGE, "entry_count")
            work = self._manager.finding_request(request.request_id, request.engine_id, request.group)
            session, group = await run_in_slices(work)
            return request_blocks_message(session, group, entries)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:  # noqa: N802
        """Explain a request."""
        async with abort_on_error(context):
            return await self._reader.explain(request.request_id)

    async def LookupPrefix(  # type: ignore[override]  # noqa: N802
        self, request: bytes, context: Context
    ) -> pb.LookupPrefixResponse:
        """Find the cached prefix of a prompt in all pools. The request is bytes: see `RawRequestInterceptor`."""
        async with abort_on_error(context):
            prefix = await run_in_slices(read_lookup(request))
            work = self._manager.lookup(prefix.token_ids, prefix.salt, prefix.model_fingerprint)
            return holdings_message(await run_in_slices(work))

    async def Audit(self, request: pb.AuditRequest, context: Context) -> pb.AuditResponse:  # noqa: N802
        """Audit one pool now."""
        async with abort_on_error(context):
            violations = await self._auditor.audit(self._manager.session(request.engine_id))
            return pb.AuditResponse(violations=[violation.message for violation in violations])

    async def WatchEvents(  # noqa: N802
        self, request: pb.WatchEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        """Stream the events of the ledger."""
        async with abort_on_error(context), aclosing(self._reader.watch(request.from_event)) as messages:
            async for message in messages:
                yield message

    def _begin(self, handshake: AttachHandshake) -> Session:
        """Release the replaced pool and begin the record of the new session."""
        # Frozen, because otherwise every full collection would traverse all blocks of the pool.
        gc.freeze()
        session = handshake.session
        assert session is not None
        if handshake.replaced is not None:
            self._release(handshake.replaced)
            if (wait := self._waits.get(handshake.replaced)) is not None:
                wait.reschedule(asyncio.get_running_loop().time())  # its stream ends now, not at its next block step
        self._recorder.begin(session, handshake.report)
        return session

    def _connect(self, session: Session) -> None:
        self._streams += 1
        self._no_engine.clear()
        self._observer.on_attach(session)
        spec, sequences = session.pool.spec, len(session.pool.sequences)
        extra = {"incarnation": spec.incarnation, "device_blocks": spec.device_blocks, "sequences": sequences}
        log.info("engine attached", extra={**_names(session), "model": spec.model, **extra})
        if self._traces is not None:
            self._traces.end_missing(session)
        self._reader.notify()

    def _disconnect(self, session: Session) -> None:
        """Keep the pool of a lost stream until the lease expires, because its engine may attach again."""
        self._streams -= 1
        self._recorder.end(session)
        if not self._streams:
            self._no_engine.set()
        if session in self._manager.sessions():
            log.info("engine disconnected", extra={**_names(session), "lease_seconds": self._leases.seconds})
            self._manager.mark_disconnected(session)
            self._observer.on_disconnect(session)
            self._leases.start(session)

    def _is_attaching(self, session: Session) -> bool:
        return self._manager.is_live(session) and self._manager.is_attaching(session)

    def _expire(self, session: Session) -> None:
        if session in self._manager.sessions():
            log.warning("engine lease expired", extra=_names(session))
            self._observer.on_lease_expired(session)
        self._drop(session)

    def _drop(self, session: Session) -> None:
        if session in self._manager.sessions():
            log.info("engine detached", extra=_names(session))
            if self._traces is not None:
                self._traces.on_detach(session)
            self._observer.on_detach(session)
            self._manager.detach(session)
            self._release(session)
        self._reader.notify()

    def _release(self, session: Session) -> None:
        """Free the memory of a dropped pool in slices, and cancel its lease."""
        self._leases.cancel(session)
        self._run_in_background(session.pool.dismantle())

    def _run_in_background(self, work: Generator[None, None, None]) -> None:
        task = asyncio.ensure_future(self._handshakes.run_in_turns(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _apply(self, session: Session, request: bytes) -> pb.StepResult:
        """Apply a block step and write the result. Most block steps take one slice."""
        begun = self._clock()
        step, trace_parents = await _run_step_in_slices(read_step(request))
        del request
        work = self._manager.applying(session, step, self._step_work)
        try:
            next(work)
        except StopIteration as end:
            result = end.value
        else:
            # Shielded, because a block step that has begun must be completed even if its stream is lost.
            task = asyncio.ensure_future(_run_step_in_slices(work))
            self._tasks.add(task)
            task.add_done_callback(self._on_step_end)
            result = await asyncio.shield(task)
        self._observer.on_step(session, result, self._clock() - begun)
        self._recorder.record(session, step, result)
        if self._traces is not None:
            self._traces.on_step(session, step, trace_parents, result)
        return await _run_step_in_slices(result_message(result))

    def _on_step_end(self, task: "asyncio.Future[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, because the stream of a replaced session no longer awaits it


def _names(session: Session) -> dict[str, object]:
    return {"engine": session.pool.spec.engine_id, "session": session.number}


def _page_size(requested: int, maximum: int, field: str) -> int:
    if requested < 0:
        raise InvalidField(f"{field} must be at least 0, not {requested}", field)
    return min(requested or maximum, maximum)


def _page_start(token: str) -> int:
    try:
        return int(token or 0)
    except ValueError as error:
        raise InvalidField(
            f"page_token must be the next_page_token of a response, not {token[:100]!r}", "page_token"
        ) from error


async def _run_step_in_slices(work: Generator[None, None, _Result]) -> _Result:
    """Run the work of a block step and return its result: its first slices without timed pauses."""
    slices = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result
        slices += 1
        await asyncio.sleep(0 if slices <= _FAST_SLICES else _PAUSE_SECONDS)
