"""The calls of an engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc

from quire.v1 import engine_pb2 as pb
from quire.v1 import engine_pb2_grpc as pb_grpc
from services.engine.driver import EngineDriver
from services.engine.gateway_link import BacklogTooLong, GatewayLink
from services.engine.output_codec import unserved_field
from services.errors import Overloaded, Unavailable, UnexpectedMessage, translated

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[pb.ServeRequest]


class EngineServicer(pb_grpc.EngineServicer):
    """Answers UNAVAILABLE until `begin` was called with a loaded engine."""

    def __init__(self, heartbeat_seconds: float) -> None:
        self._heartbeat_seconds = heartbeat_seconds
        self._driver: EngineDriver | None = None
        self._description = pb.GetEngineResponse()

    def begin(self, driver: EngineDriver, description: pb.GetEngineResponse) -> None:
        """Serve this engine from now on."""
        self._driver, self._description = driver, description

    async def Serve(self, requests: Requests, context: Context) -> AsyncIterator[pb.ServeResponse]:  # noqa: N802
        """Serve one gateway until its stream ends, which cancels its requests."""
        async with translated(context):
            driver, link = self._loaded(), GatewayLink()
            reader = asyncio.create_task(self._read(driver, link, requests))
            try:
                yield _heartbeat(driver)  # at once: a gateway takes it for the link being up
                while not reader.done():
                    yield await self._next_response(driver, link, reader)
                await reader
            finally:
                reader.cancel()
                driver.drop(link)

    async def GetEngine(self, _request: pb.GetEngineRequest, context: Context) -> pb.GetEngineResponse:  # noqa: N802
        """Describe the engine."""
        async with translated(context):
            self._loaded()
            return self._description

    async def Admin(self, request: pb.EngineAdminRequest, context: Context) -> pb.EngineAdminResponse:  # noqa: N802
        """Change what is pinned."""
        async with translated(context):
            return await self._loaded().administer(request)

    def _loaded(self) -> EngineDriver:
        if self._driver is None:
            raise Unavailable("the model is being loaded")
        return self._driver

    async def _next_response(
        self, driver: EngineDriver, link: GatewayLink, reader: "asyncio.Task[None]"
    ) -> pb.ServeResponse:
        output = asyncio.create_task(link.take())
        try:
            await asyncio.wait({output, reader}, timeout=self._heartbeat_seconds, return_when=asyncio.FIRST_COMPLETED)
            if output.done():
                return pb.ServeResponse(step=output.result(), request_blocks=driver.request_blocks)
        except BacklogTooLong as error:
            raise Overloaded(str(error)) from error
        finally:
            if not output.done():
                output.cancel()
                with suppress(asyncio.CancelledError):
                    await output
        return _heartbeat(driver)

    async def _read(self, driver: EngineDriver, link: GatewayLink, requests: Requests) -> None:
        async for request in requests:
            match request.WhichOneof("kind"):
                case "submission":
                    self._submit(driver, link, request.submission)
                case "cancel":
                    driver.cancel(link, request.cancel)
                case _:
                    raise UnexpectedMessage("expected submission or cancel, got an empty message")

    def _submit(self, driver: EngineDriver, link: GatewayLink, submission: pb.Submission) -> None:
        if (field := unserved_field(submission)) is None:
            driver.submit(link, submission)
            return
        refused = pb.RequestRefused(
            request_id=submission.request_id,
            attempt=submission.attempt,
            reason=pb.REFUSAL_REASON_UNIMPLEMENTED,
            detail=f"{field}: this version does not serve it",
            field=field,
        )
        link.push(pb.StepOutput(step=driver.steps, refused=[refused]))


def _heartbeat(driver: EngineDriver) -> pb.ServeResponse:
    heartbeat = pb.Heartbeat(steps=driver.steps)
    return pb.ServeResponse(heartbeat=heartbeat, request_blocks=driver.request_blocks)
