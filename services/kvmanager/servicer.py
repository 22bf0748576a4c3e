"""The calls of the KV manager: read the message, call the core, write the answer."""

import asyncio
import gc
import logging
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from kvmanager import KVManager, Pool, PoolReport, PoolSpec, Session, adopt
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc as pb_grpc
from services.duration import duration
from services.errors import InvalidField, UnexpectedMessage, translated
from services.kvmanager import codec
from services.kvmanager.auditing import Auditing
from services.kvmanager.block_traces import BlockTraces
from services.kvmanager.ledger_reading import LedgerReading
from services.kvmanager.observer import PoolObserver
from services.kvmanager.recording import OperationsRecorder
from services.kvmanager.report_codec import ReportReader
from services.kvmanager.slices import in_slices
from services.tracing import Tracing

_BREAK_SECONDS = 0.05
_POLITE_SECONDS = 0.001
_LARGEST_BLOCK_PAGE = 65536
_LARGEST_SEQUENCE_PAGE = 1000

log = logging.getLogger("quire.kvmanager")

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[pb.PoolRequest]


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
        self._dismantling: set[asyncio.Future[None]] = set()
        self._observer = observer
        self._clock = clock
        self._reading = LedgerReading(manager.ledger)
        self._auditing = Auditing(manager, clock)
        self._no_engine = asyncio.Event()
        self._no_engine.set()

    async def run(self) -> None:
        """Audit the pools until cancelled."""
        await self._auditing.run()

    async def all_left(self) -> None:
        """Return when no engine is attached."""
        await self._no_engine.wait()

    async def Attach(self, requests: Requests, context: Context) -> AsyncIterator[pb.PoolResponse]:  # noqa: N802
        """Attach an engine, then answer its Steps until the stream ends; a half-closed one drops the pool."""
        async with translated(context):
            session = await self._begin(requests)
            self._connect(session)
            try:
                yield self._registered(session)
                async for request in requests:
                    yield pb.PoolResponse(result=self._step(session, request))
                    self._reading.tell()  # the engine has its answer
                # A broken stream ends just as a half-closed one, but is cancelled a moment later.
                await asyncio.sleep(_BREAK_SECONDS)
                self._drop(session)
            finally:
                self._disconnect(session)

    async def ListPools(self, _request: pb.ListPoolsRequest, _context: Context) -> pb.ListPoolsResponse:  # noqa: N802
        """List the pools."""
        return pb.ListPoolsResponse(pools=[codec.pool_message(session) for session in self._manager.sessions()])

    async def GetPool(self, request: pb.GetPoolRequest, context: Context) -> pb.GetPoolResponse:  # noqa: N802
        """Count one pool."""
        async with translated(context):
            return pb.GetPoolResponse(pool=codec.pool_message(self._manager.session(request.engine_id)))

    async def GetBlockMap(  # noqa: N802
        self, request: pb.GetBlockMapRequest, context: Context
    ) -> pb.GetBlockMapResponse:
        """Show a page of one pool's blocks."""
        async with translated(context):
            if request.first_block < 0:
                raise InvalidField(f"first_block is {request.first_block}, it must not be negative", "first_block")
            count = _page_size(request.block_count, _LARGEST_BLOCK_PAGE, "block_count")
            pool = self._manager.session(request.engine_id).pool
            tier = pool.host if request.tier == pb.TIER_HOST else pool.device
            return codec.block_map_message(tier, request.first_block or 1, count)

    async def ListSequences(  # noqa: N802
        self, request: pb.ListSequencesRequest, context: Context
    ) -> pb.ListSequencesResponse:
        """Show a page of one pool's sequences."""
        async with translated(context):
            size = _page_size(request.page_size, _LARGEST_SEQUENCE_PAGE, "page_size")
            after = _page_start(request.page_token)
            pool = self._manager.session(request.engine_id).pool
            ids = sorted(sequence for sequence in pool.sequences if sequence > after)
            page = [codec.sequence_message(pool.sequences[id_], pool.spec.block_size) for id_ in ids[:size]]
            return pb.ListSequencesResponse(sequences=page, next_page_token=str(ids[size - 1]) if ids[size:] else "")

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:  # noqa: N802
        """Tell a request's story."""
        async with translated(context):
            return await self._reading.explain(request.request_id)

    async def LookupPrefix(  # noqa: N802
        self, request: pb.LookupPrefixRequest, context: Context
    ) -> pb.LookupPrefixResponse:
        """Look for a prompt's beginning in all pools."""
        async with translated(context):
            tokens = array("i", request.token_ids)
            holdings = await in_slices(self._manager.lookup(tokens, request.salt, request.model_fingerprint))
            return pb.LookupPrefixResponse(holdings=[pb.PrefixHolding(**one._asdict()) for one in holdings])

    async def Audit(self, request: pb.AuditRequest, context: Context) -> pb.AuditResponse:  # noqa: N802
        """Audit one pool now."""
        async with translated(context):
            violations = await self._auditing.audit(self._manager.session(request.engine_id))
            return pb.AuditResponse(violations=[violation.sentence for violation in violations])

    async def WatchEvents(  # noqa: N802
        self, request: pb.WatchEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        """Stream the ledger."""
        async with translated(context), aclosing(self._reading.watch(request.from_event)) as messages:
            async for message in messages:
                yield message

    async def _begin(self, requests: Requests) -> Session:
        """Read Register and the report that follows it, and adopt what that describes."""
        register = await _next(requests, "register")
        spec = codec.spec_of(register.register)
        self._manager.check(spec)
        reader = ReportReader(spec)
        last = False
        while not last:
            page = (await _next(requests, "report")).report
            reader.add(page)
            last = page.last
            await asyncio.sleep(self._politeness())
        session = self._manager.attach(spec, await self._adopted(spec, reader.report))
        self._recorder.began(session, reader.report)
        return session

    async def _adopted(self, spec: PoolSpec, report: PoolReport) -> Pool:
        """Adopt a report a slice at a time: between slices, others get their answers."""
        pool = await in_slices(adopt(spec, report), pause_seconds=self._politeness())
        # Else every full collection walks through all blocks again, which live as long as the pool.
        gc.freeze()
        return pool

    def _politeness(self) -> float:
        """Return how long to pause between two slices: not at all while no engine can be waiting."""
        return _POLITE_SECONDS if self._manager.sessions() else 0

    def _registered(self, session: Session) -> pb.PoolResponse:
        registered = pb.Registered(manager_epoch=self._manager.epoch, session=session.number)
        registered.lease.CopyFrom(duration(self._lease_seconds))
        return pb.PoolResponse(registered=registered)

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
            self._manager.lose(session)
            self._observer.lost(session)
            asyncio.get_running_loop().call_later(self._lease_seconds, self._expire, session)

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
        dismantling = asyncio.ensure_future(in_slices(session.pool.dismantle(), pause_seconds=_POLITE_SECONDS))
        self._dismantling.add(dismantling)
        dismantling.add_done_callback(self._dismantling.discard)
        self._reading.tell()

    def _step(self, session: Session, request: pb.PoolRequest) -> pb.StepResult:
        if request.WhichOneof("kind") != "step":
            raise _unexpected("step", request)
        begun = self._clock()
        step = codec.step_of(request.step)
        result = self._manager.apply(session, step)
        message = codec.result_message(result)
        self._observer.stepped(session, result, self._clock() - begun)
        self._recorder.applied(session, step, result)
        if self._traces is not None:
            self._traces.applied(session, request.step, message)
        return message


def _named(session: Session) -> dict[str, object]:
    return {"engine": session.pool.spec.engine_id, "session": session.number}


async def _next(requests: Requests, kind: str) -> pb.PoolRequest:
    async for request in requests:
        if request.WhichOneof("kind") == kind:
            return request
        raise _unexpected(kind, request)
    raise UnexpectedMessage(f"expected {kind}, but the stream ended")


def _unexpected(expected: str, request: pb.PoolRequest) -> UnexpectedMessage:
    return UnexpectedMessage(f"expected {expected}, got {request.WhichOneof('kind') or 'an empty message'}")


def _page_size(wanted: int, largest: int, field: str) -> int:
    if wanted < 0:
        raise InvalidField(f"{field} is {wanted}, it must not be negative", field)
    return min(wanted or largest, largest)


def _page_start(token: str) -> int:
    try:
        return int(token or 0)
    except ValueError as error:
        raise InvalidField(f"page_token is {token[:100]!r}, which no answer gave", "page_token") from error
