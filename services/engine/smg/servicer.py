"""The gRPC methods that smg calls: the service VllmEngine of the package smg-grpc-proto.

The names and meanings of its fields are those of vllm_engine.proto and common.proto in that package. smg keeps the
admission, so all requests are of one tenant without a salt.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as smg_pb

from quire.v1 import engine_pb2, pins_pb2
from services.engine.driver import EngineDriver
from services.engine.events.event_stream import EventStream
from services.engine.guided.constraints import Constraints
from services.engine.observer import SmgStats
from services.engine.settings import EngineSettings
from services.engine.smg.answers import Answers, Sample
from services.engine.smg.descriptions import model_info, server_info
from services.engine.smg.engine_tokenizer import EngineTokenizer
from services.engine.smg.field_names import FieldNames
from services.engine.smg.generation import Generation
from services.engine.smg.loads import Loads
from services.engine.smg.stop_strings import StopStrings
from services.engine.smg.submissions import RequestLimits, check_request, submission_of
from services.engine.smg.subscriptions import Subscriptions
from services.engine.smg.tokenizer_archive import archive_pieces, tokenizer_archive
from services.runtime.errors import InvalidField, RequestExists, ServiceError, SlowClient, Unavailable, UnsupportedField
from services.runtime.service import Readiness
from services.runtime.statuses import abort_on_error
from services.wire.duration import MAX_SECONDS, duration

Context = grpc.aio.ServicerContext[Any, Any]

_VERSION = "quire"
_TRACE_PARENT = "traceparent"
# For a reset of the prefix cache, which takes a step.
_RESET_SECONDS = 10.0
_MOST_RESET_SECONDS = 600.0
# A subscriber of events that does not read for so long is disconnected.
_WRITE_SECONDS = 30.0
_LOADING = "the engine is loading its model"
_DRAINING = "the engine is draining"


@dataclass(frozen=True)
class ServedEngine:
    """A loaded engine: what calls use, its description, and the tokens that end its texts."""

    driver: EngineDriver
    constraints: Constraints
    description: engine_pb2.GetEngineResponse
    eos_token_ids: frozenset[int]


class SmgServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Answers UNAVAILABLE until `begin` has been called with a loaded engine."""

    def __init__(self, settings: EngineSettings, readiness: Readiness) -> None:
        """`readiness` is that of the engine: it is ready while its pool is attached and it does not drain."""
        self._settings = settings
        self._readiness = readiness
        self._folder = Path(settings.model)
        self._started_at = time.monotonic()
        self._engine: ServedEngine | None = None
        self._loads: Loads | None = None
        self._subscriptions: Subscriptions | None = None
        self._tokenizer = EngineTokenizer(self._folder)
        self._archiving = asyncio.Lock()
        self._calls: dict[str, Generation] = {}
        self._no_calls = asyncio.Event()
        self._no_calls.set()

    def begin(
        self,
        driver: EngineDriver,
        constraints: Constraints,
        description: engine_pb2.GetEngineResponse,
        eos_token_ids: frozenset[int],
        events: EventStream,
    ) -> None:
        """Serve this engine from now on. `events` are its KV events."""
        self._engine = engine = ServedEngine(driver, constraints, description, eos_token_ids)
        self._loads = Loads(lambda: engine.driver.stats, engine.description)
        most, heartbeat = self._settings.kv_events_queue, self._settings.heartbeat_seconds
        self._subscriptions = Subscriptions(events, self._loads, most, heartbeat)

    def stats(self) -> SmgStats:
        """Return what was served."""
        stats = self._subscriptions.stats if self._subscriptions else SmgStats()
        return stats._replace(calls=len(self._calls))

    async def finish(self, seconds: float) -> None:
        """Wait until the calls have sent the ends of their requests, or for this time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._no_calls.wait(), seconds)

    async def Generate(self, request: smg_pb.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Generate the samples of one request.

        It writes responses instead of yielding them, so that a blocked write can be cancelled.
        """
        async with abort_on_error(context):
            engine = self._accepting()
            check_request(request)
            prompt = await self._prompt(request)
            samples = await self._samples(request)
            submission = submission_of(request, prompt, _limits(engine))
            _add_context(submission, context)
            if request.request_id in self._calls:
                raise RequestExists(f"request_id {request.request_id!r} is live", "request_id")
            generation = Generation(engine.driver, engine.constraints, submission, FieldNames(request))
            answers = Answers(request, submission.prompt_token_ids, samples)
            await self._run(request.request_id, generation, answers, context)

    async def _run(self, request_id: str, generation: Generation, answers: Answers, context: Context) -> None:
        self._calls[request_id] = generation
        self._no_calls.clear()
        try:
            with generation.link.cancel_on_overrun():
                async for response in generation.responses(answers):
                    await context.write(response)
        finally:
            generation.close()
            del self._calls[request_id]
            if not self._calls:
                self._no_calls.set()

    async def _prompt(self, request: smg_pb.GenerateRequest) -> Sequence[int]:
        if request.WhichOneof("input") == "text":
            return await self._tokenizer.token_ids(request.text)
        token_ids: Sequence[int] = request.tokenized.input_ids
        return token_ids

    async def _samples(self, request: smg_pb.GenerateRequest) -> list[Sample]:
        given = request.sampling_params
        if not given.stop:
            return [Sample(None) for _ in range(given.n or 1)]
        backend = await self._tokenizer.backend("sampling_params.stop")
        skipping = given.skip_special_tokens
        stops = (
            StopStrings(backend, given.stop, given.min_tokens, skip_special_tokens=skipping)
            for _ in range(given.n or 1)
        )
        return [Sample(one) for one in stops]

    async def Abort(self, request: smg_pb.AbortRequest, context: Context) -> smg_pb.AbortResponse:  # noqa: N802
        """End requests; ids that are not live are ignored."""
        async with abort_on_error(context):
            self._loaded()
            for request_id in request.request_ids:
                if generation := self._calls.get(request_id):
                    generation.abort()
            return smg_pb.AbortResponse()

    async def HealthCheck(  # noqa: N802
        self, _request: smg_pb.HealthCheckRequest, context: Context
    ) -> smg_pb.HealthCheckResponse:
        """Report whether requests are accepted, and if not why.

        UNAVAILABLE while the model is loaded: smg adds a worker that answers, and asks for its model only then.
        """
        async with abort_on_error(context):
            self._loaded()
            if fault := self._fault():
                return smg_pb.HealthCheckResponse(healthy=False, message=fault)
            return smg_pb.HealthCheckResponse(healthy=True, message="the engine is ready")

    async def GetModelInfo(  # noqa: N802
        self, _request: smg_pb.GetModelInfoRequest, context: Context
    ) -> smg_pb.GetModelInfoResponse:
        """Describe the model."""
        async with abort_on_error(context):
            engine = self._loaded()
            return model_info(engine.description, self._folder, engine.eos_token_ids)

    async def GetServerInfo(  # noqa: N802
        self, _request: smg_pb.GetServerInfoRequest, context: Context
    ) -> smg_pb.GetServerInfoResponse:
        """Describe the engine."""
        async with abort_on_error(context):
            engine = self._loaded()
            return server_info(engine.description, engine.driver.stats.running, time.monotonic() - self._started_at)

    async def GetLoads(  # noqa: N802
        self, request: smg_pb.GetLoadsRequest, context: Context
    ) -> smg_pb.GetLoadsResponse:
        """Report the load. `include` needs no answer: there is one section."""
        async with abort_on_error(context):
            self._loaded()
            if request.dp_rank:
                raise InvalidField("dp_rank must be 0: the engine has one rank", "dp_rank")
            assert self._loads is not None, "set together with the engine"
            return self._loads.answer(_VERSION)

    async def GetTokenizer(  # noqa: N802
        self, _request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Send the tokenizer's files as a zip archive."""
        async with abort_on_error(context):
            self._loaded()
            async with self._archiving:  # one at a time
                archive = await asyncio.to_thread(tokenizer_archive, self._folder)
            for piece in archive_pieces(archive):
                yield piece

    async def SubscribeKvEvents(  # noqa: N802
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> None:
        """Stream KV events and the load until the call is cancelled."""
        async with abort_on_error(context):
            self._loaded()
            assert self._subscriptions is not None, "set together with the engine"
            await context.send_initial_metadata(())
            async for message in self._subscriptions.messages(request):
                await _write(context, message)

    async def FlushCache(  # noqa: N802
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Reset the prefix cache, also while requests run: they keep their blocks."""
        async with abort_on_error(context):
            engine, seconds = self._loaded(), request.timeout_s
            if not 0 <= seconds <= _MOST_RESET_SECONDS:  # also false for nan
                raise InvalidField(f"timeout_s must be between 0 and {_MOST_RESET_SECONDS:g}", "timeout_s")
            reset = engine_pb2.EngineAdminRequest(reset_prefix_cache=pins_pb2.ResetPrefixCache())
            try:
                async with asyncio.timeout(max(seconds, _RESET_SECONDS)):
                    await engine.driver.administer(reset)
            except (TimeoutError, ServiceError) as error:
                reason = str(error) or "the KV manager has not answered yet; the cache is reset when it does"
                return common_pb2.FlushCacheResponse(success=False, message=reason)
            return common_pb2.FlushCacheResponse(success=True, message="the prefix cache was reset")

    async def Embed(self, _request: smg_pb.EmbedRequest, context: Context) -> smg_pb.EmbedResponse:  # noqa: N802
        """Refuse: no embeddings are computed."""
        async with abort_on_error(context):
            raise UnsupportedField("embeddings are not supported: the engine generates text")

    async def StartProfile(  # noqa: N802
        self, _request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Refuse: profiles are not taken by a call."""
        async with abort_on_error(context):
            raise UnsupportedField("profiles are not taken by a call; quire bench and traces show the time of steps")

    async def StopProfile(  # noqa: N802
        self, _request: common_pb2.StopProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Refuse, as StartProfile does."""
        async with abort_on_error(context):
            raise UnsupportedField("profiles are not taken by a call, so none runs")

    def _loaded(self) -> ServedEngine:
        if self._engine is None:
            raise Unavailable(_LOADING)
        return self._engine

    def _accepting(self) -> ServedEngine:
        engine = self._loaded()
        if self._readiness.retired:
            raise Unavailable(_DRAINING)
        return engine

    def _fault(self) -> str:
        """Return why requests are not accepted; empty if they are."""
        if self._readiness.retired:
            return _DRAINING
        return "" if self._readiness.ready else "the engine is not attached to its KV manager"


def _limits(engine: ServedEngine) -> RequestLimits:
    description = engine.description
    return RequestLimits(description.context_tokens, description.block_size, engine.driver.request_blocks)


def _add_context(submission: engine_pb2.Submission, context: Context) -> None:
    """Add the deadline of a call, and its trace."""
    seconds = context.time_remaining()
    if seconds is not None and seconds < MAX_SECONDS:  # more: gRPC's time for none
        submission.timeout.CopyFrom(duration(seconds))
    for name, value in context.invocation_metadata() or ():
        if name == _TRACE_PARENT and isinstance(value, str):
            submission.trace_parent = value


async def _write(context: Context, message: common_pb2.KvEventBatch) -> None:
    """Write a message. Raises SlowClient if the subscriber does not read."""
    try:
        async with asyncio.timeout(_WRITE_SECONDS):
            await context.write(message)
    except TimeoutError:
        raise SlowClient(f"the subscriber has not read its events for {_WRITE_SECONDS:g} s") from None
