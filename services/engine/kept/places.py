"""Where an engine keeps its blocks, and what is done there when no engine runs."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from services.engine.kept.memory_file import SUFFIX, MemoryFile
from services.engine.settings import AUTO, KEPT_WORDS, MEMORY, OFF, EngineSettings
from services.runtime.child_process import KEPT_MEMORY
from services.runtime.settings import InvalidSetting


def kept_path(settings: EngineSettings, device_type: str) -> Path | None:
    """Return where the blocks are kept, None if they are not. Raises InvalidSetting."""
    given, held = settings.keep_blocks, os.environ.get(KEPT_MEMORY)
    if given == OFF or (given == AUTO and (held is None or device_type != "cpu")):
        return None
    if device_type != "cpu":
        raise InvalidSetting(f"keep_blocks is {given!r}, but the memory of a GPU ends with its process: it must be off")
    if given not in KEPT_WORDS:
        return _path_of(settings)
    if held is None:
        fault = "which only quire serve has: give a file or folder in tmpfs or hugetlbfs"
        raise InvalidSetting(f"keep_blocks is {MEMORY!r}, {fault}")
    return Path(held)


def erase_left(settings: EngineSettings) -> None:
    """Erase what an engine left in a file, unless its settings keep it or another process uses it."""
    if settings.keep_at_stop or settings.keep_blocks in KEPT_WORDS or not (path := _path_of(settings)).exists():
        return
    with suppress(InvalidSetting):
        file = MemoryFile(path)
        file.erase()
        file.close()


def _path_of(settings: EngineSettings) -> Path:
    path = Path(settings.keep_blocks)
    name = settings.engine_id or f"{socket.gethostname()}:{settings.listen}"  # as the engine's id
    return path / f"{quote(name, safe='')}{SUFFIX}" if path.is_dir() else path
