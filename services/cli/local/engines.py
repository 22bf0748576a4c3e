"""Divides the memory and the cores of one engine among several."""

import os
import platform
from dataclasses import replace
from pathlib import Path

from services.engine.settings import KEPT_WORDS, EngineSettings
from services.runtime.settings import InvalidSetting


def split_engine(engine: EngineSettings, count: int) -> list[EngineSettings]:
    """Return the settings of `count` engines, each with a share of the memory and the cores.

    Their ids are the same at every start, so that a restarted engine replaces its pool. Raises InvalidSetting if a
    share would be empty.
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
    return [replace(shared, engine_id=f"{name}-{number}") for number in range(count)]


def _share(engine: EngineSettings, field: str, count: int) -> int:
    whole: int = getattr(engine, field)
    if 0 < whole < count:
        raise InvalidSetting(f"{field} is {whole}, which {count} engines cannot share")
    return whole // count
