"""Checks of files and addresses before `quire serve` starts a service or fetches a model."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KVManagerSettings
from services.runtime.settings import InvalidSetting


def check_files(gateway: GatewaySettings, engine: EngineSettings, kvmanager: KVManagerSettings) -> None:
    """Read the files as the services will. Raises InvalidSetting, naming the setting."""
    if gateway.api_keys:
        from services.gateway.access import authentication

        authentication.read(gateway.api_keys)
    if gateway.pinned_prompts:
        from services.gateway import pinned_prompts

        pinned_prompts.read(gateway.pinned_prompts)
    if gateway.tls_certificate:
        from services.runtime.tls import listening_files

        listening_files(gateway).check()
    if engine.record_requests and Path(engine.record_requests).is_dir():
        raise InvalidSetting(f"record_requests must be a file, not the folder {engine.record_requests!r}")
    if (folder := Path(kvmanager.record_folder)).exists() and not folder.is_dir():
        raise InvalidSetting(f"record_folder must be a folder, not the file {kvmanager.record_folder!r}")


def check_addresses(
    gateway: GatewaySettings, engines: Sequence[EngineSettings], kvmanager: KVManagerSettings, metrics: Iterable[str]
) -> None:
    """Bind the addresses for a moment. Raises InvalidSetting, naming the setting."""
    from services.runtime.transport import listen_fault

    addresses = [
        ("listen", gateway.listen),
        ("http_listen", gateway.http_listen),
        ("map_listen", kvmanager.map_listen),
        *(("metrics_listen", address) for address in metrics),
        *(("kv_events_listen", engine.kv_events_listen) for engine in engines),
        *(("kv_events_replay_listen", engine.kv_events_replay_listen) for engine in engines),
    ]
    for name, address in addresses:
        if address and (fault := listen_fault(address)):
            raise InvalidSetting(f"{name}: cannot listen on {address}: {fault}")
