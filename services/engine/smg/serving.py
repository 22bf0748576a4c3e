"""Adds the service for smg to an engine's server, where the settings ask for it."""

import logging
from typing import TYPE_CHECKING

import grpc

from services.engine.settings import EngineSettings
from services.runtime.service import Readiness
from services.runtime.settings import InvalidSetting

if TYPE_CHECKING:
    from services.engine.smg.servicer import SmgServicer

_PACKAGE = "smg_grpc_proto"

log = logging.getLogger("quire.engine")


def add_smg(server: grpc.aio.Server, settings: EngineSettings, readiness: Readiness) -> "SmgServicer":
    """Add the service to a server that was not started. Raises InvalidSetting without the packages."""
    try:
        from smg_grpc_proto import vllm_engine_pb2_grpc

        from services.engine.smg.servicer import SmgServicer
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != _PACKAGE:
            raise
        raise InvalidSetting(f"smg requires the package {_PACKAGE}: pip install 'quire[routers]'") from missing
    servicer = SmgServicer(settings, readiness)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    log.info("smg is served at the engine's address: generation, and KV events with the token ids of prompts")
    if settings.listen.startswith("unix:"):
        log.warning("smg cannot call Unix sockets, which `quire serve` uses: start `quire engine` for it")
    return servicer
