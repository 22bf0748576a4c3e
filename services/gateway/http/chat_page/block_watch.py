"""Follows the blocks of a running request, for the page that has sent it."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from quire.v1 import kvmanager_pb2 as pb
from services.gateway.access.callers import Caller
from services.gateway.access.namespace import qualified
from services.gateway.fleet.prefix_lookup import PrefixLookup
from services.gateway.http.error_responses import HttpError
from services.gateway.http.events import to_json
from services.gateway.request_handler import RequestHandler
from services.runtime.errors import Overloaded, Unavailable
from services.runtime.http.server_sent_events import Events

# About the fastest rate that a person can follow, and the most calls per watch that a KV manager receives.
_TICK_SECONDS = 0.25
# A page opens its watch together with the request, which may arrive later.
_ARRIVAL_SECONDS = 10.0
_HEARTBEAT_SECONDS = 15.0
_MAX_WATCHES = 32
_MAX_WATCHES_OF_TENANT = 8


class BlockWatches:
    """The watches of all pages. Without a KV manager, none can be opened."""

    def __init__(self, handler: RequestHandler, managers: PrefixLookup | None) -> None:
        self._handler = handler
        self._managers = managers
        self._watched: set[str] = set()
        self._of_tenant: Counter[str] = Counter()

    async def watch(self, caller: Caller, request_id: str) -> Events:
        """Yield what a request of the caller's tenant holds, whenever that changes, until the request ends.

        Raises HttpError if no such request arrives or it is watched already, Overloaded if too many are watched, and
        Unavailable without a KV manager or at a gateway that drains. Later failures of the KV manager are events.
        """
        managers = self._managers
        if managers is None:
            raise Unavailable("this gateway has no KV manager to ask (--kvmanager)")
        with self._slot(caller, qualified(caller.tenant, request_id)):
            await self._arrival(caller, request_id)
            request = pb.GetRequestBlocksRequest(request_id=qualified(caller.tenant, request_id))
            last, quiet_since = b"", _now()
            while self._handler.is_live(caller, request_id):
                state = await _state(managers, request)
                if state != last:
                    last, quiet_since = state, _now()
                    yield state
                elif _now() - quiet_since >= _HEARTBEAT_SECONDS:
                    quiet_since = _now()
                    yield b": no changes\n\n"
                await asyncio.sleep(_TICK_SECONDS)
            yield _event("ended", {})

    @contextmanager
    def _slot(self, caller: Caller, watched: str) -> Iterator[None]:
        if watched in self._watched:
            raise HttpError(HTTPStatus.CONFLICT, "the request is watched already", "request_is_watched")
        if len(self._watched) >= _MAX_WATCHES:
            raise Overloaded(f"{_MAX_WATCHES} requests are watched, which is the maximum")
        if self._of_tenant[caller.tenant] >= _MAX_WATCHES_OF_TENANT:
            raise Overloaded(f"{_MAX_WATCHES_OF_TENANT} requests are watched, which is the maximum of a tenant")
        self._watched.add(watched)
        self._of_tenant[caller.tenant] += 1
        try:
            yield
        finally:
            self._watched.remove(watched)
            self._of_tenant -= Counter((caller.tenant,))

    async def _arrival(self, caller: Caller, request_id: str) -> None:
        deadline = _now() + _ARRIVAL_SECONDS
        while not self._handler.is_live(caller, request_id):
            if self._handler.is_draining:  # the request would be rejected; an open watch would delay the end
                raise Unavailable("the gateway is draining")
            if _now() >= deadline:
                message = "no request with this id runs at this gateway"
                raise HttpError(HTTPStatus.NOT_FOUND, message, "request_not_found")
            await asyncio.sleep(_TICK_SECONDS / 5)


async def _state(managers: PrefixLookup, request: pb.GetRequestBlocksRequest) -> bytes:
    """Return the event for what a request holds now, and note in `request` where it was found."""
    try:
        found = await managers.request_blocks(request)
    except Unavailable as error:
        return _event("unavailable", {"message": str(error)})
    if found is None:
        return _event("waiting", {})
    request.engine_id, request.group = found.engine_id, found.group
    return _event("blocks", blocks_json(found))


def blocks_json(found: pb.GetRequestBlocksResponse) -> dict[str, Any]:
    """Return what a request holds, for the page; without the engine's id, which clients do not learn elsewhere."""
    return {
        "block_size": found.block_size,
        "device_blocks": found.device_blocks,
        "sequence_count": found.sequence_count,
        "sequences": [_sequence(one) for one in found.sequences],
    }


def _sequence(one: pb.SequenceBlocks) -> dict[str, Any]:
    return {
        "sequence": one.sequence,
        "tier": "host" if one.swapped else "device",
        "tokens": one.computed_tokens,
        "room": one.room_tokens,
        "prompt": one.prompt_tokens,
        "committed": one.committed_blocks,
        "blocks": one.block_count,
        "first": one.first_index,
        "table": list(one.block_ids),
        "counts": list(one.counts),
        "windows": [{"name": kind.kind, "blocks": kind.block_count, "dropped": kind.dropped} for kind in one.windows],
    }


def _event(kind: str, value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json(value).encode())


def _now() -> float:
    return asyncio.get_running_loop().time()
