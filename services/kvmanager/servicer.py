"""The calls of the KV manager: read the message, call the core, write the answer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from kvmanager import KVManager, Session
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc as pb_grpc
from services.errors import InvalidField, UnexpectedMessage, UnsupportedField, translated
from services.kvmanager import codec
from services.kvmanager.observer import PoolObserver

_LARGEST_BLOCK_PAGE = 65536
_LARGEST_SEQUENCE_PAGE = 1000

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[pb.PoolRequest]


class KVManagerServicer(pb_grpc.KVManagerServicer):
    """One writer: every call runs on the server's one event loop, and the core's verbs do not wait."""

    def __init__(self, manager: KVManager, observer: PoolObserver, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._observer = observer
        self._clock = clock
        self._no_engine = asyncio.Event()
        self._no_engine.set()

    async def all_left(self) -> None:
        """Return when no engine is attached."""
        await self._no_engine.wait()

    async def Attach(self, requests: Requests, context: Context) -> AsyncIterator[pb.PoolResponse]:  # noqa: N802
        """Attach an engine, then answer its Steps until the stream ends, which drops the pool."""
        async with translated(context):
            session = await self._begin(requests)
            self._no_engine.clear()
            self._observer.attached(session)
            try:
                yield pb.PoolResponse(
                    registered=pb.Registered(manager_epoch=self._manager.epoch, session=session.number)
                )
                async for request in requests:
                    yield pb.PoolResponse(result=self._step(session, request))
            finally:
                self._observer.detached(session)
                self._manager.detach(session)
                if not self._manager.sessions():
                    self._no_engine.set()

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
            if request.tier == pb.TIER_HOST:
                raise UnsupportedField("tier: this version has no host tier", "tier")
            if request.first_block < 0:
                raise InvalidField(f"first_block is {request.first_block}, it must not be negative", "first_block")
            count = _page_size(request.block_count, _LARGEST_BLOCK_PAGE, "block_count")
            pool = self._manager.session(request.engine_id).pool
            return codec.block_map_message(pool, request.first_block or 1, count)

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

    async def _begin(self, requests: Requests) -> Session:
        """Read Register and the report that follows it."""
        register = await _next(requests, "register")
        spec = codec.spec_of(register.register)
        while not (page := (await _next(requests, "report")).report).last:
            _check_empty(page)
        _check_empty(page)
        return self._manager.attach(spec)

    def _step(self, session: Session, request: pb.PoolRequest) -> pb.StepResult:
        if request.WhichOneof("kind") != "step":
            raise _unexpected("step", request)
        for name in ("pins", "swap_outs", "swap_ins"):
            if getattr(request.step, name):
                raise UnsupportedField(f"step.{name}: this version does not serve it", f"step.{name}")
        begun = self._clock()
        message = codec.result_message(self._manager.apply(session, codec.step_of(request.step)))
        self._observer.stepped(session, self._clock() - begun)
        return message


async def _next(requests: Requests, kind: str) -> pb.PoolRequest:
    async for request in requests:
        if request.WhichOneof("kind") == kind:
            return request
        raise _unexpected(kind, request)
    raise UnexpectedMessage(f"expected {kind}, but the stream ended")


def _unexpected(expected: str, request: pb.PoolRequest) -> UnexpectedMessage:
    return UnexpectedMessage(f"expected {expected}, got {request.WhichOneof('kind') or 'an empty message'}")


def _check_empty(page: pb.ReportPage) -> None:
    if page != pb.ReportPage(last=page.last):
        raise UnsupportedField("report: this version adopts empty reports only", "report")


def _page_size(wanted: int, largest: int, field: str) -> int:
    if wanted < 0:
        raise InvalidField(f"{field} is {wanted}, it must not be negative", field)
    return min(wanted or largest, largest)


def _page_start(token: str) -> int:
    try:
        return int(token or 0)
    except ValueError as error:
        raise InvalidField(f"page_token is {token[:100]!r}, which no answer gave", "page_token") from error
