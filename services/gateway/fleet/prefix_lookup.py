"""Client of the KV managers: how much of a prompt each engine has cached, and the blocks of a request."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

import grpc

from quire.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from services.gateway.fleet.discovery import ServiceAddresses, watch_addresses
from services.runtime import transport
from services.runtime.errors import Unavailable
from services.runtime.tls import ClientTLS
from services.wire.lookup import holdings_of, lookup_message

# The result is only a hint, so a request waits briefly for it, and after a failure none is sent for a while.
_TIMEOUT_SECONDS = 0.1
_BACKOFF_SECONDS = 1.0
# An engine that no KV manager knows is looked for at all of them, but not with every request.
_SEARCH_SECONDS = 1.0
_MAX_ENGINES = 10_000
# Of a call for the blocks of a request, which a person looks at.
_BLOCKS_TIMEOUT_SECONDS = 1.0

log = logging.getLogger("quire.gateway")

Clock = Callable[[], float]


class ManagerClient:
    """Calls one KV manager. Opens its channel on first use, on the caller's event loop."""

    def __init__(self, address: str, clock: Clock, tls: ClientTLS | None = None) -> None:
        self._address = address
        self._tls = tls
        self._clock = clock
        self._channel: grpc.aio.Channel | None = None
        self._retry_at = 0.0

    async def cached_tokens(self, request: kvmanager_pb2.LookupPrefixRequest) -> dict[str, int] | None:
        """Return the cached leading tokens on the device of each engine, or None on failure."""
        if self._clock() < self._retry_at:
            return None
        try:
            answer = await self._stub().LookupPrefix(request, timeout=_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.debug("prefix lookup at the KV manager %s failed: %s", self._address, error.details())
            self._retry_at = self._clock() + _BACKOFF_SECONDS
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                await self.close()  # so that the next channel loads the current certificates
            return None
        return {holding.engine_id: holding.device_tokens for holding in holdings_of(answer)}

    async def request_blocks(
        self, request: kvmanager_pb2.GetRequestBlocksRequest
    ) -> kvmanager_pb2.GetRequestBlocksResponse | None:
        """Return what a request holds, or None if it holds nothing here. Raises Unavailable."""
        try:
            return await self._stub().GetRequestBlocks(request, timeout=_BLOCKS_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise Unavailable("the KV manager is of an older version, which does not show requests") from error
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                await self.close()
            log.debug("blocks of a request at the KV manager %s: %s", self._address, error.details())
            raise Unavailable("the KV manager does not answer") from error

    def _stub(self) -> "kvmanager_pb2_grpc.KVManagerAsyncStub":
        if self._channel is None:
            self._channel = transport.channel(self._address, tls=self._tls)
        return kvmanager_pb2_grpc.KVManagerStub(self._channel)

    async def close(self) -> None:
        """Close the channel after the calls in flight."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=_TIMEOUT_SECONDS)


class PrefixLookup:
    """Asks the KV managers of a model's engines. It learns from their answers which one has which engines."""

    def __init__(self, managers: ServiceAddresses, clock: Clock, tls: ClientTLS | None = None) -> None:
        """KV managers with a DNS name are used while `run` runs."""
        self._addresses = managers
        self._clock = clock
        self._tls = tls
        self._clients: dict[str, ManagerClient] = {}
        self._manager_of: dict[str, str] = {}  # by engine
        self._search_at = 0.0
        self._add(managers.addresses)

    async def run(self, interval_seconds: float) -> None:
        """Resolve the DNS names of KV managers every `interval_seconds`."""
        if self._addresses.names:
            async for addresses in watch_addresses(self._addresses, interval_seconds):
                await self._use(addresses)

    async def cached_tokens(
        self, token_ids: Sequence[int], salt: bytes, fingerprint: str, engine_ids: Collection[str]
    ) -> dict[str, int] | None:
        """Return the cached leading tokens on the device of engines of this fingerprint, or None on failure.

        Engines are missing whose KV manager is not known or does not answer.
        """
        addresses = self._managers_of(engine_ids)
        request = lookup_message(token_ids, salt, fingerprint)
        answers = await asyncio.gather(*(self._clients[address].cached_tokens(request) for address in addresses))
        found: dict[str, int] = {}
        for address, answer in zip(addresses, answers, strict=True):
            if answer is not None:
                found |= answer
                self._learn(address, answer)
        return found if any(answer is not None for answer in answers) else None

    async def request_blocks(
        self, request: kvmanager_pb2.GetRequestBlocksRequest
    ) -> kvmanager_pb2.GetRequestBlocksResponse | None:
        """Return what a request holds, or None if it holds nothing. Raises Unavailable if a KV manager is missing.

        The KV manager of the engine that `request` names is asked alone, as long as it has the request.
        """
        if known := self._clients.get(self._manager_of.get(request.engine_id, "")):
            with suppress(Unavailable):
                if found := await known.request_blocks(request):
                    return found
        clients = dict(self._clients)
        calls = (client.request_blocks(request) for client in clients.values())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for address, answer in zip(clients, answers, strict=True):
            if isinstance(answer, kvmanager_pb2.GetRequestBlocksResponse):
                self._learn(address, [answer.engine_id])
                return answer
        if failure := next((one for one in answers if isinstance(one, BaseException)), None):
            raise failure
        return None

    async def close(self) -> None:
        """Close all channels after the calls in flight."""
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    def _managers_of(self, engine_ids: Collection[str]) -> list[str]:
        if len(self._clients) <= 1:
            return list(self._clients)
        known = {self._manager_of.get(one, "") for one in engine_ids}
        if not known <= self._clients.keys() and self._clock() >= self._search_at:
            self._search_at = self._clock() + _SEARCH_SECONDS
            return list(self._clients)
        return sorted(known & self._clients.keys())

    def _learn(self, address: str, engine_ids: Iterable[str]) -> None:
        if len(self._manager_of) >= _MAX_ENGINES:
            self._manager_of.clear()  # of engines that have gone
        self._manager_of |= dict.fromkeys(engine_ids, address)

    def _add(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            self._clients[address] = ManagerClient(address, self._clock, self._tls)

    async def _use(self, addresses: Collection[str]) -> None:
        removed = self._clients.keys() - addresses
        self._add(address for address in addresses if address not in self._clients)
        self._manager_of = {engine: one for engine, one in self._manager_of.items() if one not in removed}
        await asyncio.gather(*(self._clients.pop(address).close() for address in removed))
