"""The HTTP server in front of a handler whose output and errors are set by the test."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.access.callers import ANONYMOUS, Caller, Origin
from services.gateway.dialects.parser import DialectParser
from services.gateway.fleet.load_estimate import CurrentLoad
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
PROMPT_TOKENS = 3
# No client reaches these limits, even on a slow machine.
LONG_LIMITS = HttpLimits(CONNECTIONS, read_seconds=60, write_seconds=60)
# For tests of the limits.
SHORT_LIMITS = HttpLimits(CONNECTIONS, read_seconds=0.3, write_seconds=0.5)


class ScriptedHandler:
    """Generates the prompt `max_tokens` times. `rejection` rejects a request, `failure` ends it after a token."""

    def __init__(self, folder: Path) -> None:
        self.own_tokenizer = Tokenizer.load(folder)
        self.callers: list[Caller] = []
        self.text = "x"  # of each token, if the prompt is a chat
        self.script: list[tuple[str, list[int]]] = []  # texts and tokens to generate instead,
        self.deltas: list[gateway_pb2.Delta] | None = None  # or those of as many samples as the client wants
        self.in_thought = False
        self.ends_at_limit = False
        self.finished: gateway_pb2.Finished | None = None  # instead of an end of the sequence
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self.parsed: list[tuple[str, int, dict[str, int]]] = []
        self.rejection: Exception | None = None
        self.failure: BaseException | None = None
        self.hold = asyncio.Event()
        self.hold.set()
        self.engines = [CurrentLoad(requests=3, waiting=1, tokens=50), CurrentLoad(0, 0, 0)]
        self.running = 0
        self.started = 0

    async def generate(
        self, request: gateway_pb2.GenerateRequest, origin: Origin, *, caps_output: bool = False
    ) -> Responses:
        self.callers.append(origin.caller)
        self.requests.append(request)
        if self.rejection:
            raise self.rejection
        self.running += 1
        self.started += 1
        try:
            sampling = decoding_pb2.Sampling(sample_count=max(1, request.sampling.sample_count))
            usage = gateway_pb2.Usage(prompt_tokens=PROMPT_TOKENS)
            counted = self.finished.usage if self.finished else usage
            yield Response(
                started=gateway_pb2.Started(
                    model="played",
                    sampling=sampling,
                    prompt_tokens=counted.prompt_tokens,
                    cached_tokens=counted.cached_tokens,
                    in_thought=self.in_thought,
                )
            )
            for delta in self._one_sample(request) if self.deltas is None else self.deltas:
                usage.generated_tokens += len(delta.token_ids)
                yield Response(delta=delta)
                await self.hold.wait()
                if self.failure:
                    raise self.failure
            limit, stop = decoding_pb2.FINISH_REASON_LENGTH, decoding_pb2.FINISH_REASON_STOP
            end = gateway_pb2.SampleFinish(reason=limit if self.ends_at_limit else stop)
            ends = [end] * sampling.sample_count
            yield Response(finished=self.finished or gateway_pb2.Finished(samples=ends, usage=usage))
        finally:
            self.running -= 1

    def _one_sample(self, request: gateway_pb2.GenerateRequest) -> list[gateway_pb2.Delta]:
        repeated = [(request.prompt.text or self.text, [1])] * request.stopping.max_tokens
        return [gateway_pb2.Delta(text=text, token_ids=ids) for text, ids in self.script or repeated]

    async def token_ids(
        self, model: str, prompt: gateway_pb2.Prompt, caller: object = None, *, open_turn: bool = True
    ) -> list[int]:
        return self.own_tokenizer.encode(prompt.text) if prompt.text else [1]

    async def text(self, request: gateway_pb2.DetokenizeRequest) -> str:
        return "x"

    def on_parsed(self, model: str, parser: DialectParser) -> None:
        failures = {kind.value: count for kind, count in parser.failures.items()}
        self.parsed.append((parser.calls_name, parser.calls, failures))

    def check(self, request: gateway_pb2.GenerateRequest) -> None:
        pass

    def check_count(self, requests: list[gateway_pb2.GenerateRequest], origin: Origin) -> None:
        pass

    def tokenizer(self, model: str) -> Tokenizer:
        return self.own_tokenizer

    @property
    def in_flight(self) -> int:
        return self.running

    def loads(self) -> list[CurrentLoad]:
        return self.engines

    def models(self) -> list[gateway_pb2.GetModelResponse]:
        return [self.model("played")]

    def model(self, name: str) -> gateway_pb2.GetModelResponse:
        if name not in ("", "played"):
            raise UnknownModel(f"model {name!r} is not served", "model")
        return gateway_pb2.GetModelResponse(model="played", context_tokens=100)


class ScriptedAdministration:
    """Records requests."""

    def __init__(self) -> None:
        self.requests: list[gateway_pb2.AdminRequest] = []

    async def administer(self, request: gateway_pb2.AdminRequest, timeout: float) -> gateway_pb2.AdminResponse:
        assert timeout > 0
        self.requests.append(request)
        return gateway_pb2.AdminResponse()


class Observer(GatewayObserver):
    def __init__(self) -> None:
        self.requests: list[tuple[str, str, int]] = []

    def on_http_request(self, route: str, method: str, status: int) -> None:
        self.requests.append((route, method, status))


class ScriptedServer:
    """A server on its own thread and event loop."""

    def __init__(self, folder: Path, limits: HttpLimits = LONG_LIMITS, context: ssl.SSLContext | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.handler, self.readiness, self.observer = ScriptedHandler(folder), Readiness(), Observer()
        self.administration = ScriptedAdministration()
        self.readiness.set(True)
        app = ObservedApp(
            make_app(self.handler, self.administration, self.readiness, _authenticate), self.readiness, self.observer
        )
        self.server = HttpServer(app, limits, context, lambda status: count_rejection(self.observer, status))
        self.url = self.run(self.server.start("127.0.0.1:0"))
        assert self.server._server is not None
        for listener in self.server._server.sockets:  # connections inherit it; the default is up to 32 MB
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        self.place = ("127.0.0.1", int(self.url.rpartition(":")[2]))
        self.client = httpx.Client(
            base_url=self.url, limits=httpx.Limits(max_keepalive_connections=0), timeout=CALL_SECONDS
        )

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS)

    def call(self, work: Callable[[], object]) -> None:
        async def done() -> None:
            work()

        self.run(done())

    def settle(self) -> None:
        """Wait until no client is connected and all requests have been observed."""

        async def quiet() -> None:
            while self.server._state.connections or self.server._state.tasks:
                await asyncio.sleep(0.005)

        self.run(quiet())

    def turns(self) -> None:
        """Let the event loop take some turns, so that it reads what has arrived."""
        for _ in range(8):
            self.call(lambda: None)

    def waiting(self) -> int:
        """Return the most requests that wait for their turn on one connection."""
        return max((len(one.pipeline) for one in self.server._state.connections), default=0)  # type: ignore[union-attr]

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Block the event loop, so that the server reads at once all bytes that arrive inside."""
        blocked, unblock = threading.Event(), threading.Event()

        def block() -> None:
            blocked.set()
            unblock.wait(CALL_SECONDS)

        self._loop.call_soon_threadsafe(block)
        assert blocked.wait(CALL_SECONDS)
        try:
            yield
        finally:
            unblock.set()

    def close(self) -> None:
        self.client.close()
        self.run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _authenticate(authorization: str | None) -> Caller:
    if authorization == "Bearer wrong":
        raise Unauthenticated("the API key is unknown")
    if authorization == "Bearer humble":
        return Caller("humble", operator=False)
    return Caller("theirs") if authorization else ANONYMOUS
