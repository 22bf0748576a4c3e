"""Divides the memory and the cores of one engine among several."""

import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.engine.settings import KEPT_WORDS, EngineSettings
from services.runtime.settings import InvalidSetting


def split_engine(engine: EngineSettings, count: int) -> list[EngineSettings]:
    """Return the settings of `count` engines, each with a share of the memory and the cores.

    Their ids are the same at every start, so that a restarted engine replaces its pool. Their KV events have ports one
    after another, as vLLM's ranks have. Raises InvalidSetting if a share would be empty, or ports would clash.
    """
    # Its default name is that of its socket, which changes at every start.
    name = engine.engine_id or platform.node()
    if count == 1:
        return [replace(engine, engine_id=name)]
    if engine.device == "cuda":
        raise InvalidSetting(f"engines is {count}, but all of them would share one GPU: start each with `quire engine`")
    engine = engine.for_device(on_gpu=False)
    if engine.keep_blocks not in KEPT_WORDS and not Path(engine.keep_blocks).is_dir():
        raise InvalidSetting(f"keep_blocks is {engine.keep_blocks!r}, but {count} engines need a folder for files")
    shared = replace(
        engine,
        device="cpu",  # `auto` would give each of them the same GPU
        cache_mib=_share(engine, "cache_mib", count),
        device_blocks=_share(engine, "device_blocks", count),
        host_blocks=_share(engine, "host_blocks", count),
        threads=engine.threads or max(1, len(os.sched_getaffinity(0)) // count),
    )
    return [
        replace(shared, engine_id=f"{name}-{number}", **_event_addresses(engine, number, count))
        for number in range(count)
    ]


def _event_addresses(engine: EngineSettings, number: int, count: int) -> dict[str, Any]:
    """Return the addresses of an engine's KV events: the first engine's with further ports. Port 0 is any."""
    found: dict[str, Any] = {}
    for name in ("kv_events_listen", "kv_events_replay_listen"):
        host, _, port = getattr(engine, name).rpartition(":")
        if port:
            found[name] = f"{host}:{int(port) + number if int(port) else 0}"
    ports = [int(address.rpartition(":")[2]) for address in found.values()]
    if len(ports) == 2 and 0 < abs(ports[0] - ports[1]) < count:
        raise InvalidSetting(
            f"kv_events_replay_listen must be at least {count} ports from kv_events_listen with {count} engines"
        )
    return found


def _share(engine: EngineSettings, field: str, count: int) -> int:
    whole: int = getattr(engine, field)
    if 0 < whole < count:
        raise InvalidSetting(f"{field} is {whole}, which {count} engines cannot share")
    return whole // count
