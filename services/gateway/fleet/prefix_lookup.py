"""Asks the KV manager how much of a prompt each engine has cached."""

import logging
from collections.abc import Callable, Sequence

import grpc

from quire.v1 import kvmanager_pb2_grpc as pb_grpc
from services.runtime import transport
from services.runtime.tls import ClientTLS
from services.wire.lookup import holdings_of, lookup_message

# A request waits so long at most for what is only a hint, and for a while nobody asks a manager that did not answer.
_ANSWER_SECONDS = 0.1
_PAUSE_SECONDS = 1.0

log = logging.getLogger("quire.gateway")


class PrefixLookup:
    """A KV manager's LookupPrefix. Makes its channel when first used, on the event loop that asks."""

    def __init__(self, address: str, clock: Callable[[], float], tls: ClientTLS | None = None) -> None:
        self._address = address
        self._tls = tls
        self._clock = clock
        self._channel: grpc.aio.Channel | None = None
        self._paused_until = 0.0

    async def cached_tokens(self, token_ids: Sequence[int], salt: bytes, fingerprint: str) -> dict[str, int] | None:
        """Return the leading tokens on the device of each engine of this fingerprint, or None without an answer."""
        if self._clock() < self._paused_until:
            return None
        if self._channel is None:
            self._channel = transport.channel(self._address, tls=self._tls)
        request = lookup_message(token_ids, salt, fingerprint)
        try:
            answer = await pb_grpc.KVManagerStub(self._channel).LookupPrefix(request, timeout=_ANSWER_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.debug("the KV manager at %s says nothing of prefixes: %s", self._address, error.details())
            self._paused_until = self._clock() + _PAUSE_SECONDS
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                await self.close()  # the next one is made with the certificates of then
            return None
        return {holding.engine_id: holding.device_tokens for holding in holdings_of(answer)}

    async def close(self) -> None:
        """Close the channel, once what is asked over it is answered."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=_ANSWER_SECONDS)
