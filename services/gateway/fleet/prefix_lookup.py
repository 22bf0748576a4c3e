"""Client of the KV manager's LookupPrefix: how much of a prompt each engine has cached."""

import logging
from collections.abc import Callable, Sequence

import grpc

from quire.v1 import kvmanager_pb2_grpc as pb_grpc
from services.runtime import transport
from services.runtime.tls import ClientTLS
from services.wire.lookup import holdings_of, lookup_message

# The result is only a hint, so a request waits briefly for it, and after a failure none is sent for a while.
_TIMEOUT_SECONDS = 0.1
_BACKOFF_SECONDS = 1.0

log = logging.getLogger("quire.gateway")


class PrefixLookup:
    """Calls LookupPrefix of one KV manager. Opens its channel on first use, on the caller's event loop."""

    def __init__(self, address: str, clock: Callable[[], float], tls: ClientTLS | None = None) -> None:
        self._address = address
        self._tls = tls
        self._clock = clock
        self._channel: grpc.aio.Channel | None = None
        self._retry_at = 0.0

    async def cached_tokens(self, token_ids: Sequence[int], salt: bytes, fingerprint: str) -> dict[str, int] | None:
        """Return the cached leading tokens on the device of each engine of this fingerprint, or None on failure."""
        if self._clock() < self._retry_at:
            return None
        if self._channel is None:
            self._channel = transport.channel(self._address, tls=self._tls)
        request = lookup_message(token_ids, salt, fingerprint)
        try:
            answer = await pb_grpc.KVManagerStub(self._channel).LookupPrefix(request, timeout=_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.debug("prefix lookup at the KV manager %s failed: %s", self._address, error.details())
            self._retry_at = self._clock() + _BACKOFF_SECONDS
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                await self.close()  # so that the next channel loads the current certificates
            return None
        return {holding.engine_id: holding.device_tokens for holding in holdings_of(answer)}

    async def close(self) -> None:
        """Close the channel after the calls in flight."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=_TIMEOUT_SECONDS)
