"""The engine's server, without health service and signals."""

import asyncio
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from blocks import KIND_0
from engine.run.loop import Engine
from kvmanager import PoolSpec
from quire.v1 import decoding_pb2, engine_pb2, engine_pb2_grpc
from services.engine.block_client import BlockClient, SealedBlocks
from services.engine.driver import EngineDriver
from services.engine.events.engine_events import engine_events
from services.engine.guided.constraints import Constraints
from services.engine.kept.keeping import erase_opened
from services.engine.kept.logged_proof import LoggedProof
from services.engine.kept.places import erase_left
from services.engine.observer import CacheStats, EngineObserver, ModelFormats
from services.engine.recording import RequestsRecorder
from services.engine.request_reports import RequestReports
from services.engine.servicer import EngineServicer
from services.engine.settings import EngineSettings
from services.engine.smg.serving import add_smg
from services.engine.startup.end_tokens import file_name
from services.engine.startup.generation_config import check_generation, generation_defaults
from services.engine.startup.parts import Assembly, Attachment, BlockLink, Kept, Model, OtherRanks, Parts
from services.engine.startup.tokenizer_files import TokenizerFiles
from services.runtime import transport
from services.runtime.service import Readiness
from services.runtime.tls import link_tls, server_tls
from services.runtime.tracing.export import create_tracing
from services.wire.features import FEATURES
from services.wire.field_rules import numbers_of

if TYPE_CHECKING:  # it needs packages of the extra `routers`
    from services.engine.smg.servicer import SmgServicer

# At shutdown: for the step in flight, and for gateways to read their last outputs.
_LAST_SECONDS = 2.0
# For the last writes to leave the process. A longer grace would only wait for health watchers.
_FLUSH_SECONDS = 0.1

log = logging.getLogger("quire.engine")


class EngineService:
    """Serves one model: loads it, attaches its pool to the KV manager, and runs the engine on its own thread."""

    name = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name

    def __init__(
        self,
        settings: EngineSettings,
        observer: EngineObserver | None = None,
        assembly: Assembly | None = None,
        attachment: Attachment | None = None,
        *,
        exits: bool = False,
    ) -> None:
        """Make the server; it listens after `start`, and is ready while the pool is attached.

        `observer` receives its steps. `assembly` puts the engine together; by default it loads the model of the
        settings. `attachment` replaces the stream to the KV manager. With `exits` the process has nothing else to do:
        a stop ends it while a model is loaded.

        Raises InvalidSetting if the record, the traces or the TLS files cannot be used, or if the server would be open
        to other machines without protection.
        """
        settings.check_exposure()
        if assembly is None:
            from services.engine.ranks.start import assemble

            assembly = assemble
        self._settings = settings
        self._assembly = assembly
        self._attachment = attachment
        self._exits = exits or settings.tensor_parallel > 1
        self._tls, self._link_tls = server_tls(settings), link_tls(settings)
        self._observer = observer or EngineObserver()
        self._incarnation = time.time_ns()
        self._address = settings.listen
        self._events = engine_events(settings, self._incarnation)
        self._tracing = create_tracing("engine", settings.otlp_endpoint)
        self._recorder = RequestsRecorder(settings.record_requests)
        self._driver: EngineDriver | None = None
        self._link: BlockLink | None = None
        self._constraints: Constraints | None = None
        self._ranks: OtherRanks | None = None
        self._kept: Kept | None = None
        self._stopped_early = False
        self.readiness = Readiness()
        self.server = transport.server(transport.LINK_MESSAGE_BYTES)
        self._servicer = EngineServicer(settings.heartbeat_seconds)
        engine_pb2_grpc.add_EngineServicer_to_server(self._servicer, self.server)
        self._smg = add_smg(self.server, settings, self.readiness) if settings.smg else None

    @property
    def servicer(self) -> EngineServicer:
        """The methods, for callers in this process."""
        return self._servicer

    async def start(self) -> str:
        """Listen; calls are answered with UNAVAILABLE until the model is loaded."""
        self._address = transport.bind(self.server, self._settings.listen, self._tls)
        if self._events:
            await self._events.bind()
        await self.server.start()
        return self._address

    async def run(self) -> None:
        """Load the model, and run until cancelled. Raises the error that stopped the engine."""
        check_generation(self._settings.generation_config, Path(self._settings.model))
        try:
            parts = await asyncio.to_thread(self._assembly, self._settings)
        except asyncio.CancelledError:
            self._stopped_early = True
            raise
        self._ranks, self._kept = parts.ranks, parts.kept
        self.readiness.notes = _notes(parts.recording_faults)
        engine_id = self._settings.engine_id or f"{socket.gethostname()}:{self._address}"
        loaded, bounds = parts.loaded, self._settings.json_bounds()
        folder = Path(self._settings.model)
        self._constraints = Constraints(folder, loaded.vocabulary_size, loaded.eos_token_ids, bounds)
        driver, link = self._connect(parts, self._constraints, engine_id)
        gc.freeze()  # otherwise each full collection would traverse the objects of torch and of the model
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if parts.ranks:
            parts.ranks.watch(partial(_fail, failed))
        thread = threading.Thread(target=self._drive, args=(driver, failed), name="engine", daemon=True)
        async with asyncio.TaskGroup() as tasks:
            thread.start()
            tasks.create_task(link.run())
            tasks.create_task(self._follow(link))
            tasks.create_task(self._constraints.load())
            if self._events:
                tasks.create_task(self._events.beat(self._settings.heartbeat_seconds))
            await failed

    def _connect(self, parts: Parts, constraints: Constraints, engine_id: str) -> tuple[EngineDriver, BlockLink]:
        pool = parts.scheduler.pool
        spec = PoolSpec(
            engine_id=engine_id,
            incarnation=self._incarnation,
            model_fingerprint=parts.loaded.fingerprint,
            block_size=pool.block_size,
            device_blocks=pool.device_blocks,
            host_blocks=pool.host_blocks,
            model=self._settings.served_name(),
            windows=pool.windows,
            retention_tokens=self._settings.retention_tokens if pool.windows else 0,
        )
        reports = RequestReports(spec.model, engine_id, self._tracing)
        link = self._attach(spec, lambda: driver.wake(), reports.trace_parents, _sealed(parts))
        names = KIND_0, *(kind.name for kind in pool.windows)
        proof = LoggedProof(parts.proof, names) if parts.proof else None
        engine = Engine(parts.scheduler, parts.runner, link, time.monotonic, proof)
        patience = self._settings.seconds_without_kvmanager
        self._recorder.begin(parts.scheduler, engine_id)
        driver = EngineDriver(engine, parts.loaded.eos_token_ids, patience, self._observer, self._recorder, reports)
        self._driver, self._link = driver, link
        if self._events:
            self._events.begin(spec)
        ranks, formats, kept, counting = parts.ranks, _formats(parts.loaded), parts.kept, parts.proof
        smg = self._smg
        self._observer.on_start(
            self._settings.served_name(),
            engine_id,
            lambda: driver.stats._replace(
                sessions=link.sessions,
                ranks=ranks.stats() if ranks else None,
                formats=formats,
                recording_faults=parts.recording_faults,
                kept=kept.stats() if kept else None,
                proof=counting.counts if counting else None,
                cache=CacheStats(spec.block_size, spec.device_blocks, spec.host_blocks, link.usage),
                events=self._events.stats if self._events else None,
                smg=smg.stats() if smg else None,
            ),
        )
        tokenizer = TokenizerFiles(Path(self._settings.model))
        description = self._description(parts, engine_id, tokenizer)
        self._servicer.begin(driver, constraints, description, tokenizer)
        if smg:
            assert self._events is not None, "the settings say so"
            smg.begin(driver, constraints, description, parts.loaded.eos_token_ids, self._events.stream)
        return driver, link

    def _attach(
        self, spec: PoolSpec, wake: Callable[[], None], trace_parents: Mapping[str, str], sealed: SealedBlocks | None
    ) -> BlockLink:
        if self._attachment:
            return self._attachment(spec, wake)
        needs = ("register.kinds",) if spec.windows else ()
        rows = sealed.rows if sealed else None
        follow = self._events.follow(rows.take_adopted() if rows else {}) if self._events else None
        manager = self._settings.kvmanager
        return BlockClient(manager, spec, wake, self._link_tls, trace_parents, None, needs, sealed, follow)

    def _description(self, parts: Parts, engine_id: str, tokenizer: TokenizerFiles) -> engine_pb2.GetEngineResponse:
        capacity = parts.scheduler.capacity
        return engine_pb2.GetEngineResponse(
            model=self._settings.served_name(),
            engine_id=engine_id,
            model_fingerprint=parts.loaded.fingerprint,
            context_tokens=capacity.context_tokens,
            vocabulary_size=capacity.vocabulary_size,
            block_size=capacity.block_size,
            device_blocks=capacity.device_blocks,
            **_formats(parts.loaded)._asdict(),
            tokenizer_digest=tokenizer.digest(),
            max_sequences=parts.scheduler.limits.max_sequences,
            device=parts.device,
            features=FEATURES,
            generation_defaults=self._generation_defaults(),
        )

    def _generation_defaults(self) -> decoding_pb2.GenerationDefaults:
        defaults = generation_defaults(self._settings.generation_config, Path(self._settings.model))
        if text := numbers_of(defaults):
            log.info("%s: defaults of requests are %s", file_name(self._settings.generation_config), text)
        return defaults

    def _drive(self, driver: EngineDriver, failed: "asyncio.Future[None]") -> None:
        """Body of the engine's thread; an exception of the loop ends the service."""
        try:
            with torch.inference_mode():  # once, not for each step
                driver.run()
        except Exception as error:
            _fail(failed, self._ranks.reason(error) if self._ranks else error)
        except BaseException as error:
            _fail(failed, error)

    async def _follow(self, link: BlockLink) -> None:
        """Be ready while the pool is attached."""
        while True:
            await link.attached.wait()
            self.readiness.set(True)
            await link.detached.wait()
            self.readiness.set(False)

    async def drain(self) -> None:
        """Refuse new requests, wait for running ones until the grace time is over, and detach the pool."""
        self.readiness.retire()
        self._servicer.retire()
        if self._driver and self._link:
            await finish(self._driver, self._servicer, self._link, self._settings.grace_seconds, self._smg)
            self._driver = None  # nothing is left to abandon
            if self._events:
                await self._events.finish()
            if self._kept:
                self._kept.end(keep=self._settings.keep_at_stop)

    async def stop(self) -> None:
        """Close the server and the record. If the engine was not drained, it has failed: its links break."""
        if self._driver:
            with suppress(TimeoutError):  # a step may take long
                await asyncio.wait_for(self._driver.abandon(), _LAST_SECONDS)
        if self._events:
            await self._events.close()
        if self._constraints:
            self._constraints.close()
        if self._ranks:
            await asyncio.to_thread(self._ranks.close)
        await self.server.stop(grace=_FLUSH_SECONDS)
        await asyncio.to_thread(self._recorder.close)
        await asyncio.to_thread(self._tracing.close)
        if self._stopped_early and self._exits:
            log.info("engine was stopped before its model was loaded")
            if not self._settings.keep_at_stop:
                erase_opened()
            erase_left(self._settings)
            await asyncio.sleep(_FLUSH_SECONDS)
            # Its thread may load for minutes, or wait for other ranks for half an hour, and the interpreter would wait
            # for it. The ranks that it has started end with it.
            os._exit(0)


async def finish(
    driver: EngineDriver,
    servicer: EngineServicer,
    link: BlockLink,
    grace_seconds: float,
    smg: "SmgServicer | None" = None,
) -> None:
    """Wait for running requests until the grace time is over, stop the engine's thread, and detach the pool.

    Live requests end before the streams of their gateways do, so that gateways fail over at once. The pool is detached
    while the stream to the KV manager is open.
    """
    with suppress(TimeoutError):
        await asyncio.wait_for(driver.drain(), grace_seconds)
    with suppress(TimeoutError):  # a step may take long
        await asyncio.wait_for(driver.stop(), _LAST_SECONDS)
    await servicer.finish(_LAST_SECONDS)
    if smg:
        await smg.finish(_LAST_SECONDS)
    link.close()
    if link.attached.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(link.detached.wait(), _LAST_SECONDS)


def _notes(recording_faults: Mapping[str, str]) -> list[str]:
    return [
        f"steps are launched, not recorded ({kind}): {reason}" for kind, reason in recording_faults.items() if reason
    ]


def _sealed(parts: Parts) -> SealedBlocks | None:
    if parts.kept:
        return SealedBlocks(parts.kept.seals, parts.kept.report, parts.kept.rows)
    return SealedBlocks(parts.proof.seals) if parts.proof else None


def _formats(model: Model) -> ModelFormats:
    dtype, kv_dtype = (str(one).removeprefix("torch.") for one in (model.dtype, model.cache_dtype))
    return ModelFormats(dtype, model.weight_format, kv_dtype)


def _fail(failed: "asyncio.Future[None]", error: BaseException) -> None:
    """Set the exception of a future from any thread, unless it has one."""

    def set_exception() -> None:
        if not failed.done():
            failed.set_exception(error)

    failed.get_loop().call_soon_threadsafe(set_exception)
