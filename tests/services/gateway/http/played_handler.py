"""The HTTP server by itself, in front of a handler that does what a test says."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.access.callers import ANONYMOUS, Caller, Origin
from services.gateway.http.app import make_app
from services.gateway.http.server import ObservedApp, count_rejection
from services.gateway.observe.observer import GatewayObserver
from services.gateway.request_handler import Responses
from services.gateway.text.tokenizer import Tokenizer
from services.runtime.errors import Unauthenticated, UnknownModel
from services.runtime.http.connection import HttpLimits
from services.runtime.http.server import HttpServer
from services.runtime.service import Readiness
from tests.running_quire import CALL_SECONDS

Response = gateway_pb2.GenerateResponse
CONNECTIONS = 8
# Nobody who does what a test says is given up, on however slow a machine.
PATIENT = HttpLimits(CONNECTIONS, read_seconds=60, write_seconds=60)
# For the tests of just that.
HASTY = HttpLimits(CONNECTIONS, read_seconds=0.3, write_seconds=0.5)


class PlayedHandler:
    """Says `x` as often as max_tokens says; fails as told, before or behind the first token."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.load(folder)
        self.callers: list[Caller] = []
        self.refusal: Exception | None = None
        self.failure: BaseException | None = None
        self.hold = asyncio.Event()
        self.hold.set()
        self.running = 0
        self.begun = 0  # never fewer

    async def generate(self, request: gateway_pb2.GenerateRequest, origin: Origin) -> Responses:
        self.callers.append(origin.caller)
        if self.refusal:
            raise self.refusal
        self.running += 1
        self.begun += 1
        try:
            sampling = decoding_pb2.Sampling(sample_count=1)
            yield Response(started=gateway_pb2.Started(model="played", sampling=sampling))
            for _ in range(request.stopping.max_tokens):
                yield Response(delta=gateway_pb2.Delta(text=request.prompt.text or "x", token_ids=[1]))
                await self.hold.wait()
                if self.failure:
                    raise self.failure
            end = gateway_pb2.SampleFinish(reason=decoding_pb2.FINISH_REASON_STOP)
            yield Response(finished=gateway_pb2.Finished(samples=[end]))
        finally:
            self.running -= 1

    async def token_ids(self, model: str, prompt: gateway_pb2.Prompt, *, open_turn: bool = True) -> list[int]:
        return [1]

    async def text(self, request: gateway_pb2.DetokenizeRequest) -> str:
        return "x"

    def tokenizer(self, model: str) -> Tokenizer:
        return self._tokenizer

    def models(self) -> list[gateway_pb2.GetModelResponse]:
        return [self.model("played")]

    def model(self, name: str) -> gateway_pb2.GetModelResponse:
        if name not in ("", "played"):
            raise UnknownModel(f"model {name!r} is not served", "model")
        return gateway_pb2.GetModelResponse(model="played", context_tokens=100)


class Observer(GatewayObserver):
    """Remembers requests over HTTP."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, int]] = []

    def on_http_request(self, route: str, method: str, status: int) -> None:
        self.requests.append((route, method, status))


class PlayedServer:
    """A server on a thread with an event loop of its own."""

    def __init__(self, folder: Path, bounds: HttpLimits = PATIENT) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.handler, self.readiness, self.observer = PlayedHandler(folder), Readiness(), Observer()
        self.readiness.set(True)
        app = ObservedApp(make_app(self.handler, self.readiness, _authenticate), self.readiness, self.observer)
        self.server = HttpServer(app, bounds, on_rejected=lambda status: count_rejection(self.observer, status))
        self.url = self.run(self.server.start("127.0.0.1:0"))
        self.place = ("127.0.0.1", int(self.url.rpartition(":")[2]))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS)

    def call(self, work: Callable[[], object]) -> None:
        """Do something on the server's own loop."""

        async def done() -> None:
            work()

        self.run(done())

    def settle(self) -> None:
        """Wait until nobody is connected and the observer has heard of everything."""

        async def quiet() -> None:
            while self.server._state.connections or self.server._state.tasks:
                await asyncio.sleep(0.005)

        self.run(quiet())

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Inside, it does nothing; afterwards it finds together what has come one after the other."""
        stands, go_on = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            go_on.wait(CALL_SECONDS)

        self._loop.call_soon_threadsafe(stand)
        assert stands.wait(CALL_SECONDS)
        try:
            yield
        finally:
            go_on.set()

    def close(self) -> None:
        self.run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _authenticate(authorization: str | None) -> Caller:
    if authorization == "Bearer wrong":
        raise Unauthenticated("the API key is unknown")
    return Caller("theirs") if authorization else ANONYMOUS
