"""The KV manager's server."""

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvmanager import KVManager
from quire.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from services.kvmanager.garbage_collection import run_collections
from services.kvmanager.observer import PoolObserver
from services.kvmanager.raw_request_interceptor import RawRequestInterceptor
from services.kvmanager.recorder import OperationsRecorder
from services.kvmanager.servicer import KVManagerServicer
from services.kvmanager.settings import KVManagerSettings
from services.runtime import exposure, transport
from services.runtime.service import Readiness
from services.runtime.tls import ServerContext, listening_files, server_tls
from services.runtime.tracing.export import create_tracing

if TYPE_CHECKING:  # the page's dependencies are imported only if it is served
    from services.runtime.http.server import HttpServer

log = logging.getLogger("quire.kvmanager")


class KVManagerService:
    """Serves one KVManager."""

    name = kvmanager_pb2.DESCRIPTOR.services_by_name["KVManager"].full_name

    def __init__(self, settings: KVManagerSettings, observer: PoolObserver | None = None) -> None:
        """Create the server; it listens from `start` on. `observer` receives its events.

        Raises InvalidSetting if records or traces cannot be written, a TLS file is invalid, or the server would be
        reachable from other machines without TLS.
        """
        settings.check_exposure()
        self._settings = settings
        self._tls = server_tls(settings)
        self.manager = KVManager(epoch=secrets.randbits(64), max_blocks=settings.max_blocks)
        self._recorder = OperationsRecorder(settings.record_folder, settings.record_megabytes)
        self._map_tls: ServerContext | None = None
        if settings.map_listen and settings.tls_certificate:
            self._map_tls = ServerContext(listening_files(settings))
        self._map: HttpServer | None = None
        self.readiness = Readiness()
        self.server = transport.server(
            transport.STEP_MESSAGE_BYTES, [RawRequestInterceptor()], transport.LINK_MESSAGE_BYTES
        )
        self._tracing = create_tracing("kvmanager", settings.otlp_endpoint)
        self._servicer = KVManagerServicer(
            self.manager,
            observer or PoolObserver(),
            time.perf_counter,
            settings.lease_seconds,
            self._recorder,
            self._tracing if settings.otlp_endpoint else None,
        )
        kvmanager_pb2_grpc.add_KVManagerServicer_to_server(self._servicer, self.server)

    async def start(self) -> str:
        """Listen and become ready; return the address. Raises AddressUnavailable."""
        address = transport.bind(self.server, self._settings.listen, self._tls)
        await self.server.start()
        if self._settings.map_listen:
            await self._start_map(self._settings.map_listen)
        self.readiness.set(True)
        return address

    async def _start_map(self, listen: str) -> None:
        from services.kvmanager.pages.server import block_map_server

        context = self._map_tls.context if self._map_tls else None
        self._map = block_map_server(self.manager, time.monotonic, local=exposure.is_local(listen), context=context)
        log.info("block map at %s", await self._map.start(listen))

    async def run(self) -> None:
        """Run the background tasks until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._servicer.run())
            tasks.create_task(run_collections(self.manager, time.monotonic))
            if self._map_tls:
                tasks.create_task(self._map_tls.reload_on_change())

    async def drain(self) -> None:
        """Wait until all engines have detached, at most for the grace time."""
        self.readiness.retire()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._servicer.wait_detached(), self._settings.grace_seconds)

    async def stop(self) -> None:
        """Close the servers, the records and the traces."""
        if self._map:
            await self._map.stop()
        await self.server.stop(grace=0)
        await asyncio.to_thread(self._recorder.close)
        await asyncio.to_thread(self._tracing.close)
