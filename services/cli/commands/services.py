"""The commands that start services: all of them, or one by one. Heavy imports wait until a command needs them."""

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from services.cli.local.settings import LocalSettings
from services.cli.options import options_of, settings_from, warn_of_unused_variables
from services.engine.settings import EngineSettings
from services.gateway.settings import CHAT, NO_PAGES, GatewaySettings
from services.kvmanager.settings import KVManagerSettings
from services.runtime.addresses import check_http_listen_address
from services.runtime.exposure import is_local
from services.runtime.ports import ENGINE, GATEWAY, KVMANAGER, local
from services.runtime.settings import InvalidSetting

if TYPE_CHECKING:
    from services.engine.ranks.placement import Placement
    from services.runtime.service import Service

# In `quire serve` engines and KV manager listen on Unix sockets.
_OF_LINKS = ("link_ca", "link_certificate", "link_key", "link_server_name")
# A restarted engine loads its model first.
_SECONDS_TO_RESTART = 60.0
# One option for all three services.
_COMMON = ("grace_seconds", "log_format", "log_level", "otlp_endpoint", "metrics_compat")
_NOT_OF_SERVES_GATEWAY = ("engines", "discovery_seconds", "kvmanager", *_COMMON, *_OF_LINKS)
NOT_OF_SERVES_ENGINE = (
    *("listen", "kvmanager", "tls_certificate", "tls_key", "tls_client_ca", "insecure"),
    *_OF_LINKS,
)


def engine_variables(command: str) -> dict[str, list[str]]:
    """Return the environment variables of an engine's settings in a command that starts engines: its own, then theirs.

    A variable of an engine does not set what is one option for several services.
    """
    names = [field.name for field in dataclasses.fields(EngineSettings) if field.name not in _COMMON]
    prefixes = (f"QUIRE_{command.upper()}", "QUIRE_ENGINE")
    return {name: [f"{prefix}_{name.upper()}" for prefix in prefixes] for name in names}


_OF_SERVES_KVMANAGER = ("map_listen", "kv_cache_metrics_sample", "record_folder", "record_megabytes")
_NOT_OF_SERVES_KVMANAGER = tuple(
    field.name for field in dataclasses.fields(KVManagerSettings) if field.name not in _OF_SERVES_KVMANAGER
)
# The gateway's settings of these names also hold for the block map of the KV manager.
_OF_PORTS = ("tls_certificate", "tls_key", "tls_client_ca", "insecure")

_Settings = TypeVar("_Settings", KVManagerSettings, EngineSettings, GatewaySettings)
_Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def _metrics_option(default: str, meaning: str = "Address of the metrics for Prometheus: host:port.") -> _Decorator:
    return click.option(
        "--metrics-listen", default=default, show_default=True, callback=_checked, help=f"{meaning} Empty: none."
    )


def _checked(_context: click.Context, _option: click.Parameter, address: str) -> str:
    try:
        if address:
            check_http_listen_address("metrics_listen", address)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from error
    return address


def _closed(settings: _Settings) -> _Settings:
    """Return the settings. Raises UsageError, before the start, if they expose the service without protection."""
    try:
        settings.check_exposure()
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from error
    return settings


@click.command()
@click.argument("served", metavar="[MODEL]", required=False)
@options_of(LocalSettings)
@options_of(GatewaySettings, leave_out=_NOT_OF_SERVES_GATEWAY, failover_seconds=_SECONDS_TO_RESTART, pages=CHAT)
@options_of(EngineSettings, leave_out=NOT_OF_SERVES_ENGINE, variables=engine_variables("serve"))
@options_of(KVManagerSettings, leave_out=_NOT_OF_SERVES_KVMANAGER)
@_metrics_option(
    local(GATEWAY.metrics),
    "Address of the gateway's metrics for Prometheus: host:port. Engine and KV manager use the next two ports, further "
    "engines the ports after them.",
)
def serve(served: str | None, metrics_listen: str, **values: Any) -> None:
    """Start KV manager, engine and gateway, each as a process.

    MODEL is short for --model MODEL.

    The services call each other over Unix sockets; clients call the gateway at --listen. Each log line begins with the
    name of its service. A service that exits is restarted. Ctrl-C or SIGTERM stops all services after running requests
    have finished.
    """
    from services.cli.commands.serve import serve as run
    from services.cli.local.engines import split_engine
    from services.cli.local.supervisor import metrics_addresses

    warn_of_unused_variables(starts=("engine", "gateway", "kvmanager"))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise click.UsageError(
            "WORLD_SIZE is given, but quire serve starts its ranks itself: torchrun starts quire engine"
        )
    if served is not None:
        if click.get_current_context().get_parameter_source("model") is ParameterSource.COMMANDLINE:
            raise click.UsageError("MODEL and --model cannot be given together")
        values["model"] = served
    local = settings_from(LocalSettings, values)
    del values["engines"]  # the gateway's setting of that name has their addresses
    engine_values = {name: value for name, value in values.items() if name not in NOT_OF_SERVES_ENGINE}
    engine = settings_from(EngineSettings, engine_values)
    values["pages"] = _pages(values["pages"], values["http_listen"])
    gateway = _closed(settings_from(GatewaySettings, values))
    of_kvmanager = (*_OF_PORTS, *_OF_SERVES_KVMANAGER) if values["map_listen"] else _OF_SERVES_KVMANAGER
    kvmanager = _closed(settings_from(KVManagerSettings, {name: values[name] for name in of_kvmanager}))
    try:
        engine.check_event_exposure()
        split_engine(engine, local.engines)
        metrics = metrics_addresses(metrics_listen, local.engines)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if gateway.link_timeout_seconds <= engine.heartbeat_seconds:
        raise click.UsageError(
            f"link_timeout_seconds must be more than heartbeat_seconds, {engine.heartbeat_seconds:g}, not"
            f" {gateway.link_timeout_seconds:g}: the gateway would lose engines between two heartbeats"
        )
    sys.exit(run(kvmanager, engine, gateway, metrics, local))


def _pages(given: str, http_listen: str) -> str:
    """Return the pages of `quire serve`: by default, those of an API that only this machine reaches."""
    default = click.get_current_context().get_parameter_source("pages") is ParameterSource.DEFAULT
    return NO_PAGES if default and not (http_listen and is_local(http_listen)) else given


@click.command()
@options_of(KVManagerSettings)
@_metrics_option(local(KVMANAGER.metrics))
def kvmanager(metrics_listen: str, **values: Any) -> None:
    """Start a KV manager: the bookkeeping of blocks.

    Any number of engines can attach to it, each with its own pool.
    """
    from services.kvmanager.metrics import KVManagerMetrics
    from services.kvmanager.server import KVManagerService
    from services.runtime.metrics.page import Exposition
    from services.runtime.run_service import run_service

    warn_of_unused_variables()
    settings = _closed(settings_from(KVManagerSettings, values))
    metrics = KVManagerMetrics(settings.kv_cache_metrics_sample)
    exposition = Exposition(metrics.registry, metrics_listen, metrics.prepare, settings.metrics_compat)
    sys.exit(run_service("kvmanager", settings, exposition, lambda: lambda: KVManagerService(settings, metrics)))


@click.command()
@options_of(EngineSettings)
@_metrics_option(local(ENGINE.metrics))
def engine(metrics_listen: str, **values: Any) -> None:
    """Start an engine: one model with its KV cache.

    It needs a KV manager, and waits until one is available. Under torchrun it is one of --tensor-parallel ranks.
    """
    from services.cli.local_model import engine_with_folder
    from services.engine.metrics import EngineMetrics
    from services.runtime.metrics.page import Exposition
    from services.runtime.run_service import run_service

    warn_of_unused_variables()
    settings = _closed(settings_from(EngineSettings, values))
    place = _placement(settings)
    if place and place.rank:
        sys.exit(_run_rank(settings, place))
    metrics = EngineMetrics(settings.metrics_compat)

    def prepare() -> "Callable[[], Service]":
        local = engine_with_folder(settings)
        _let_threads_sleep()
        from services.engine.ranks.start import assemble
        from services.engine.server import EngineService

        return lambda: EngineService(local, metrics, assemble, exits=True)

    exposition = Exposition(metrics.registry, metrics_listen, compat=settings.metrics_compat)
    sys.exit(run_service("engine", settings, exposition, prepare))


@click.command()
@options_of(GatewaySettings)
@_metrics_option(local(GATEWAY.metrics))
def gateway(metrics_listen: str, **values: Any) -> None:
    """Start a gateway: the service that clients call.

    It needs an engine, and waits until one is available. Engines report the models that they serve.
    """
    from services.gateway.observe.metrics import GatewayMetrics
    from services.runtime.metrics.page import Exposition
    from services.runtime.run_service import run_service

    warn_of_unused_variables()
    settings = _closed(settings_from(GatewaySettings, values))
    metrics = GatewayMetrics()

    def prepare() -> "Callable[[], Service]":
        from services.gateway.server import GatewayService

        return lambda: GatewayService(settings, metrics)

    exposition = Exposition(metrics.registry, metrics_listen, compat=settings.metrics_compat)
    sys.exit(run_service("gateway", settings, exposition, prepare))


def _placement(settings: EngineSettings) -> "Placement | None":
    from services.engine.ranks.placement import placement

    try:
        return placement(settings.tensor_parallel, os.environ)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from error


def _run_rank(settings: EngineSettings, place: "Placement") -> int:
    from services.cli.local_model import engine_with_folder

    _let_threads_sleep()
    from services.engine.ranks.worker_process import run_rank

    return run_rank(settings, place, engine_with_folder)


def _let_threads_sleep() -> None:
    """Let compute threads sleep while they wait; must be called before torch is imported.

    Threads that spin take cores from the other services of a small machine, and then wait for each other.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
