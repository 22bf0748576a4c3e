"""The gRPC methods of an engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc

from quire.v1 import engine_pb2 as pb
from quire.v1 import engine_pb2_grpc as pb_grpc
from services.engine.driver import EngineDriver
from services.engine.gateway_link import GatewayLink, Heartbeat
from services.engine.guided.constraints import Constraints
from services.engine.request_parser import RequestParser
from services.engine.startup.tokenizer_files import TokenizerFiles
from services.runtime.errors import Unavailable, UnexpectedMessage
from services.runtime.statuses import abort_on_error

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[pb.ServeRequest]


class EngineServicer(pb_grpc.EngineServicer):
    """Answers UNAVAILABLE until `begin` has been called with a loaded engine."""

    def __init__(self, heartbeat_seconds: float) -> None:
        self._heartbeat_seconds = heartbeat_seconds
        self._links: dict[
            GatewayLink, None
        ] = {}  # an ordered set, so that links are woken in the same order in each run
        self._no_links = asyncio.Event()
        self._draining = False
        self._engine: tuple[EngineDriver, Constraints] | None = None
        self._description = pb.GetEngineResponse()
        self._tokenizer: TokenizerFiles | None = None

    def begin(
        self,
        driver: EngineDriver,
        constraints: Constraints,
        description: pb.GetEngineResponse,
        tokenizer: TokenizerFiles,
    ) -> None:
        """Serve this engine from now on."""
        self._engine, self._description, self._tokenizer = (driver, constraints), description, tokenizer
        driver.on_manager_change(self._wake_links)

    def retire(self) -> None:
        """Announce to all gateways that this engine refuses new requests."""
        self._draining = True
        self._wake_links()

    async def finish(self, seconds: float) -> None:
        """End the streams of all gateways after their queued outputs are sent, or after this time."""
        for link in self._links:
            link.close()
        if self._links:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._no_links.wait(), seconds)

    async def Serve(self, requests: Requests, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Serve one gateway until its stream ends, which cancels its requests.

        It writes responses instead of yielding them, so that a blocked write can be cancelled.
        """
        async with abort_on_error(context):
            (driver, constraints), link = self._loaded(), GatewayLink()
            parser = RequestParser(driver, link, constraints)
            heartbeat = Heartbeat(self._heartbeat_seconds, link.wake, asyncio.get_running_loop())
            reader = asyncio.create_task(self._read(parser, requests))
            reader.add_done_callback(lambda _: link.wake())
            self._add(link)
            try:
                with link.cancel_on_overrun():
                    await context.write(self._response(driver))  # at once: it shows the gateway that the link is up
                    while not (reader.done() or link.closed):
                        with heartbeat:
                            output = await link.get()
                        await context.write(self._response(driver, output))
                if reader.done():
                    await reader
            finally:
                heartbeat.cancel()
                reader.cancel()
                parser.close()
                self._remove(link)

    async def GetEngine(self, _request: pb.GetEngineRequest, context: Context) -> pb.GetEngineResponse:  # noqa: N802
        """Describe the engine."""
        async with abort_on_error(context):
            self._loaded()
            return self._description

    async def GetTokenizer(  # noqa: N802
        self, _request: pb.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        """Send the tokenizer's files."""
        async with abort_on_error(context):
            self._loaded()
            assert self._tokenizer is not None, "set together with the engine"
            for piece in self._tokenizer.pieces():
                yield piece

    async def Admin(self, request: pb.EngineAdminRequest, context: Context) -> pb.EngineAdminResponse:  # noqa: N802
        """Pin, unpin, list or reset the prefix cache."""
        async with abort_on_error(context):
            driver, _ = self._loaded()
            return await driver.administer(request)

    def _add(self, link: GatewayLink) -> None:
        self._links[link] = None
        self._no_links.clear()

    def _remove(self, link: GatewayLink) -> None:
        self._links.pop(link, None)
        if not self._links:
            self._no_links.set()

    def _wake_links(self) -> None:
        for link in self._links:
            link.wake()

    def _loaded(self) -> tuple[EngineDriver, Constraints]:
        if self._engine is None:
            raise Unavailable("the engine is loading its model")
        return self._engine

    def _response(self, driver: EngineDriver, step: pb.StepOutput | None = None) -> pb.ServeResponse:
        """Return a message with output, or a heartbeat; both describe the engine's state."""
        load = driver.load
        return pb.ServeResponse(
            step=step,
            heartbeat=pb.Heartbeat(steps=driver.steps) if step is None else None,
            request_blocks=driver.request_blocks,
            draining=self._draining,
            without_kvmanager=driver.without_kvmanager,
            load=pb.EngineLoad(
                running=load.running,
                waiting=load.waiting,
                prompt_tokens=load.uncomputed_tokens,
                available_blocks=load.available_blocks,
            ),
        )

    async def _read(self, parser: RequestParser, requests: Requests) -> None:
        async for request in requests:
            match request.WhichOneof("kind"):
                case "submission":
                    parser.submit(request.submission)
                case "cancel":
                    parser.cancel(request.cancel)
                case _:
                    raise UnexpectedMessage("expected submission or cancel, got an empty message")
