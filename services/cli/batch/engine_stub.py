"""The methods of an engine in this process, as a gateway's link calls them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc

from quire.v1 import engine_pb2 as pb
from services.engine.servicer import EngineServicer
from services.runtime.errors import Unavailable

# Nobody waits for single tokens, and messages and wake-ups would take processors from the engine. A request's end is
# delivered with the next read, its other tokens rarely: only stop strings wait for them.
_READ_SECONDS = 0.1
_HELD_SECONDS = 0.5


class EngineStub:
    """Calls a servicer directly: no connection, no serialization."""

    def __init__(self, servicer: EngineServicer) -> None:
        self._servicer = servicer

    @asynccontextmanager
    async def connect(self, _address: str) -> AsyncIterator[Any]:
        """Open a session; all addresses are this engine."""
        yield self

    async def GetEngine(self, request: pb.GetEngineRequest, timeout: float) -> pb.GetEngineResponse:  # noqa: N802
        """Describe the engine. Raises Unavailable until its model is loaded."""
        del timeout
        return await self._servicer.GetEngine(request, _Context())  # type: ignore[arg-type]

    def GetTokenizer(  # noqa: N802
        self, request: pb.GetTokenizerRequest, timeout: float
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        """Read the tokenizer's files."""
        del timeout
        return self._servicer.GetTokenizer(request, _Context())  # type: ignore[arg-type]

    def Serve(self, requests: AsyncIterator[pb.ServeRequest]) -> "_ServeCall":  # noqa: N802
        """Open the stream."""
        return _ServeCall(self._servicer, requests)


class _Context:
    """What a servicer needs of a call's context. `responses` holds the one that the caller reads next."""

    def __init__(self) -> None:
        self.responses: asyncio.Queue[pb.ServeResponse] = asyncio.Queue(maxsize=1)

    async def write(self, response: pb.ServeResponse) -> None:
        await self.responses.put(response)

    async def abort(self, code: grpc.StatusCode, details: str, _metadata: Sequence[Any] = ()) -> NoReturn:
        raise Unavailable(f"{code.name}: {details}")


class _ServeCall:
    """An open stream. It is read at intervals, and the engine merges the outputs of the steps in between."""

    def __init__(self, servicer: EngineServicer, requests: AsyncIterator[pb.ServeRequest]) -> None:
        self._context = _Context()
        self._serving = asyncio.create_task(servicer.Serve(requests, self._context))  # type: ignore[arg-type]
        self._held = HeldTokens()
        self._next_read = 0.0

    async def read(self) -> pb.ServeResponse | None:
        """Return the next response, None after the last. Raises the error of the stream."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._next_read - loop.time())
        self._next_read = loop.time() + _READ_SECONDS
        reading = asyncio.ensure_future(self._context.responses.get())
        try:
            await asyncio.wait({reading, self._serving}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                self._serving.result()
                return None
            self._held.exchange(reading.result().step, loop.time())
            return reading.result()
        except asyncio.CancelledError:
            self._serving.cancel()
            raise
        finally:
            reading.cancel()


class HeldTokens:
    """Tokens of requests that have not ended, one message for each sample."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, int], pb.SampleTokens] = {}
        self._due = 0.0

    def exchange(self, step: pb.StepOutput, now: float) -> None:
        """Hold the tokens of a step, and put those of ended requests into it; after a while, all."""
        for one in step.tokens:
            key = one.request_id, one.sample
            if key in self._tokens:
                self._tokens[key].MergeFrom(one)
            else:
                self._tokens[key] = one
        ended = {end.request_id for ends in (step.finished, step.refused) for end in ends}
        if all_due := now >= self._due:
            self._due = now + _HELD_SECONDS
        released = [key for key in self._tokens if all_due or key[0] in ended]
        tokens = [self._tokens.pop(key) for key in released]
        del step.tokens[:]
        step.tokens.extend(tokens)
