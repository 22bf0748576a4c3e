"""The calls of the KV manager: read the message, call the core, write the answer."""

import asyncio
import gc
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing
from typing import Any

import grpc

from kvmanager import KVManager, Session
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc as pb_grpc
from services.kvmanager.attach_handshake import AttachHandshake
from services.kvmanager.auditor import Auditor
from services.kvmanager.block_traces import BlockTraces
from services.kvmanager.ledger_reader import LedgerReader
from services.kvmanager.observer import PoolObserver
from services.kvmanager.recorder import OperationsRecorder
from services.kvmanager.slices import run_in_slices, run_step_in_slices
from services.runtime.errors import InvalidField, Overloaded
from services.runtime.statuses import abort_on_error
from services.runtime.tracing.spans import Tracing
from services.wire.attach import registered_message
from services.wire.lookup import holdings_message, read_lookup
from services.wire.pool import block_map_message, pool_message, sequences_message
from services.wire.step_reader import read_step
from services.wire.step_result import result_message

_BREAK_SECONDS = 0.05
_POLITE_SECONDS = 0.001
_LARGEST_BLOCK_PAGE = 65536
_LARGEST_SEQUENCE_PAGE = 1000
# Units of a Step's work that are done without a pause: about half a millisecond.
_STEP_WORK = 1000
# Each may have a message under way, or a report.
_MOST_STREAMS = 256

log = logging.getLogger("quire.kvmanager")

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[bytes]


class KVManagerServicer(pb_grpc.KVManagerServicer):
    """One writer: every call runs on the server's one event loop, and the core's verbs do not wait."""

    def __init__(
        self,
        manager: KVManager,
        observer: PoolObserver,
        clock: Callable[[], float],
        lease_seconds: float,
        recorder: OperationsRecorder,
        tracing: Tracing | None = None,
    ) -> None:
        """Without `tracing`, no part of a Step is even looked at for traces."""
        self._manager = manager
        self._recorder = recorder
        self._traces = BlockTraces(tracing) if tracing else None
        self._lease_seconds = lease_seconds
        self._streams = 0
        self._attaches = 0
        self._under_way: set[asyncio.Future[Any]] = set()
        self._leases: dict[Session, asyncio.TimerHandle] = {}
        self._observer = observer
        self._clock = clock
        self._reading = LedgerReader(manager.ledger)
        self._auditing = Auditor(manager, clock)
        self._no_engine = asyncio.Event()
        self._no_engine.set()

    async def run(self) -> None:
        """Audit the pools until cancelled."""
        await self._auditing.run()

    async def all_left(self) -> None:
        """Return when no engine is attached."""
        await self._no_engine.wait()

    async def Attach(  # type: ignore[override]  # noqa: N802
        self, requests: Requests, context: Context
    ) -> AsyncIterator[pb.PoolResponse]:
        """Attach an engine, then answer its Steps until the stream ends; a half-closed one drops the pool.

        Its messages are bytes: see `RawRequestInterceptor`.
        """
        async with abort_on_error(context):
            if self._attaches >= _MOST_STREAMS:
                raise Overloaded(f"{self._attaches} streams are open, which is all that this KV manager takes")
            self._attaches += 1
            try:
                async with aclosing(self._serve(requests)) as responses:
                    async for response in responses:
                        yield response
            finally:
                self._attaches -= 1

    async def _serve(self, requests: Requests) -> AsyncGenerator[pb.PoolResponse]:
        attaching = AttachHandshake(self._manager, self._clock)
        try:
            async with aclosing(attaching.progress(requests)) as signs:
                async for sign in signs:
                    yield sign
            session = self._begun(attaching)
        finally:
            if not self._recorder.records:
                self._soon(attaching.report.dismantle())
        self._connect(session)
        try:
            yield registered_message(self._manager.epoch, session.number, self._lease_seconds)
            async for request in requests:
                yield pb.PoolResponse(result=await self._answered(session, request))
                self._reading.tell()  # the engine has its answer
            # A broken stream ends just as a half-closed one, but is cancelled a moment later.
            await asyncio.sleep(_BREAK_SECONDS)
            self._drop(session)
        finally:
            self._disconnect(session)

    async def ListPools(self, _request: pb.ListPoolsRequest, _context: Context) -> pb.ListPoolsResponse:  # noqa: N802
        """List the pools."""
        return pb.ListPoolsResponse(pools=map(pool_message, self._manager.sessions()))

    async def GetPool(self, request: pb.GetPoolRequest, context: Context) -> pb.GetPoolResponse:  # noqa: N802
        """Count one pool."""
        async with abort_on_error(context):
            return pb.GetPoolResponse(pool=pool_message(self._manager.session(request.engine_id)))

    async def GetBlockMap(  # noqa: N802
        self, request: pb.GetBlockMapRequest, context: Context
    ) -> pb.GetBlockMapResponse:
        """Show a page of one pool's blocks."""
        async with abort_on_error(context):
            if request.first_block < 0:
                raise InvalidField(f"first_block is {request.first_block}, it must not be negative", "first_block")
            count = _page_size(request.block_count, _LARGEST_BLOCK_PAGE, "block_count")
            pool = self._manager.session(request.engine_id).pool
            tier = pool.host if request.tier == pb.TIER_HOST else pool.device
            return await run_in_slices(block_map_message(tier, request.first_block or 1, count))

    async def ListSequences(  # noqa: N802
        self, request: pb.ListSequencesRequest, context: Context
    ) -> pb.ListSequencesResponse:
        """Show a page of one pool's sequences."""
        async with abort_on_error(context):
            size = _page_size(request.page_size, _LARGEST_SEQUENCE_PAGE, "page_size")
            after = _page_start(request.page_token)
            pool = self._manager.session(request.engine_id).pool
            found = await run_in_slices(pool.listing_sequences(after, size + 1))
            return await run_in_slices(sequences_message(found, size, pool.spec.block_size))

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:  # noqa: N802
        """Explain a request."""
        async with abort_on_error(context):
            return await self._reading.explain(request.request_id)

    async def LookupPrefix(  # type: ignore[override]  # noqa: N802
        self, request: bytes, context: Context
    ) -> pb.LookupPrefixResponse:
        """Look for a prompt's beginning in all pools. The request is bytes: see `RawRequestInterceptor`."""
        async with abort_on_error(context):
            prefix = await run_in_slices(read_lookup(request))
            work = self._manager.lookup(prefix.token_ids, prefix.salt, prefix.model_fingerprint)
            return holdings_message(await run_in_slices(work))

    async def Audit(self, request: pb.AuditRequest, context: Context) -> pb.AuditResponse:  # noqa: N802
        """Audit one pool now."""
        async with abort_on_error(context):
            violations = await self._auditing.audit(self._manager.session(request.engine_id))
            return pb.AuditResponse(violations=[violation.sentence for violation in violations])

    async def WatchEvents(  # noqa: N802
        self, request: pb.WatchEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        """Stream the ledger."""
        async with abort_on_error(context), aclosing(self._reading.watch(request.from_event)) as messages:
            async for message in messages:
                yield message

    def _begun(self, attaching: AttachHandshake) -> Session:
        """Let go of what the engine had before, and record what it has now."""
        # Else every full collection walks through all blocks again, which live as long as the pool.
        gc.freeze()
        session = attaching.session
        assert session is not None
        if attaching.replaced is not None:
            self._let_go(attaching.replaced)
        self._recorder.began(session, attaching.report)
        return session

    def _connect(self, session: Session) -> None:
        self._streams += 1
        self._no_engine.clear()
        self._observer.attached(session)
        spec, sequences = session.pool.spec, len(session.pool.sequences)
        told = {"incarnation": spec.incarnation, "device_blocks": spec.device_blocks, "sequences": sequences}
        log.info("engine attached", extra={**_named(session), "model": spec.model, **told})
        if self._traces is not None:
            self._traces.forget_others(session)
        self._reading.tell()

    def _disconnect(self, session: Session) -> None:
        """Keep the pool of a broken stream for the lease's time: its engine may come back, and others see it."""
        self._streams -= 1
        self._recorder.ended(session)
        if not self._streams:
            self._no_engine.set()
        if session in self._manager.sessions():
            log.info("stream of an engine broke", extra={**_named(session), "lease_seconds": self._lease_seconds})
            self._manager.mark_disconnected(session)
            self._observer.lost(session)
            loop = asyncio.get_running_loop()
            self._leases[session] = loop.call_later(self._lease_seconds, self._expire, session)

    def _expire(self, session: Session) -> None:
        if session in self._manager.sessions():
            log.warning("lease of an engine expired", extra=_named(session))
            self._observer.expired(session)
        self._drop(session)

    def _drop(self, session: Session) -> None:
        if session in self._manager.sessions():
            log.info("engine detached", extra=_named(session))
            if self._traces is not None:
                self._traces.dropped(session)
            self._observer.detached(session)
            self._manager.detach(session)
            self._let_go(session)
        self._reading.tell()

    def _let_go(self, session: Session) -> None:
        """Give the memory of a pool back, at once but in slices: nobody has it any more."""
        if (lease := self._leases.pop(session, None)) is not None:
            lease.cancel()
        self._soon(session.pool.dismantle())

    def _soon(self, work: Generator[None, None, None]) -> None:
        doing = asyncio.ensure_future(run_in_slices(work, pause_seconds=_POLITE_SECONDS))
        self._under_way.add(doing)
        doing.add_done_callback(self._under_way.discard)

    async def _answered(self, session: Session, request: bytes) -> pb.StepResult:
        """Do a Step, and write the answer; most of them take one slice."""
        begun = self._clock()
        step, trace_parents = await run_step_in_slices(read_step(request))
        del request
        work = self._manager.applying(session, step, _STEP_WORK)
        try:
            next(work)
        except StopIteration as end:
            result = end.value
        else:
            # A Step that has begun is done to its end, whatever becomes of its stream.
            doing = asyncio.ensure_future(run_step_in_slices(work))
            self._under_way.add(doing)
            doing.add_done_callback(self._ended)
            result = await asyncio.shield(doing)
        self._observer.stepped(session, result, self._clock() - begun)
        self._recorder.applied(session, step, result)
        if self._traces is not None:
            self._traces.applied(session, step, trace_parents, result)
        return await run_step_in_slices(result_message(result))

    def _ended(self, doing: "asyncio.Future[Any]") -> None:
        self._under_way.discard(doing)
        if not doing.cancelled():
            doing.exception()  # that of a session that was replaced meanwhile has nobody to go to


def _named(session: Session) -> dict[str, object]:
    return {"engine": session.pool.spec.engine_id, "session": session.number}


def _page_size(wanted: int, largest: int, field: str) -> int:
    if wanted < 0:
        raise InvalidField(f"{field} is {wanted}, it must not be negative", field)
    return min(wanted or largest, largest)


def _page_start(token: str) -> int:
    try:
        return int(token or 0)
    except ValueError as error:
        raise InvalidField(f"page_token is {token[:100]!r}, which no answer gave", "page_token") from error
