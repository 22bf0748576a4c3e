"""Fetches models before a service starts: services take folders only."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread

from engine.native import build, cpu_class
from services.engine.settings import EngineSettings
from services.models.model_store import configuration, default_cache, resolve
from services.models.stage_display import StageDisplay, StageLog, StageProgress

log = logging.getLogger("quire")

_POLL_SECONDS = 0.1


def fetch(name: str, *, logged: bool = False) -> Path:
    """Return the folder of a model, fetching it if necessary with a display of the progress. Raises ModelUnavailable.

    SIGTERM and Ctrl-C interrupt it with KeyboardInterrupt, and end its child processes.
    """
    return _shown(resolve, name, logged=logged)


def fetch_configuration(name: str) -> Path:
    """Return a folder with a model's configuration, or its .gguf file, without its weights; otherwise like `fetch`."""
    return _shown(configuration, name)


def _shown(bring: Callable[[str, Path, StageProgress], Path], name: str, *, logged: bool = False) -> Path:
    with _progress(logged=logged) as progress:
        return bring(name, default_cache(), progress)


@contextmanager
def _progress(*, logged: bool) -> Iterator[StageProgress]:
    """Show progress; meanwhile SIGTERM interrupts as Ctrl-C does."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if logged:
            yield StageLog(log)
        else:
            with StageDisplay() as display:
                yield display
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def engine_with_folder(settings: EngineSettings) -> EngineSettings:
    """Return the settings with the model's folder instead of its name; clients still use the name.

    The default folder of compiled kernels is next to the models. Raises as `fetch` does.
    """
    kernels = settings.kernels_folder or str(default_cache().parent / "kernels")
    compilation = _first_compilation(settings, Path(kernels))
    logged = settings.log_format == "json"
    folder = str(fetch(settings.model, logged=logged))
    if compilation:
        _await(compilation, logged=logged)
    return replace(settings, model=folder, model_name=settings.served_name(), kernels_folder=kernels)


def _first_compilation(settings: EngineSettings, folder: Path) -> Thread | None:
    """Compile the CPU kernels while the model is fetched, if none were compiled before and the engine may need them."""
    if folder.exists() or settings.device == "cuda" or settings.attention_backend not in ("auto", "cpu"):
        return None
    thread = Thread(target=_compile, args=(folder,), name="compilation", daemon=True)
    thread.start()
    return thread


def _await(compilation: Thread, *, logged: bool) -> None:
    with _progress(logged=logged) as progress:
        while compilation.is_alive():
            progress("compiling the CPU kernels, once")
            compilation.join(_POLL_SECONDS)


def _compile(folder: Path) -> None:
    with suppress(cpu_class.KernelsUnavailable, OSError):  # the engine reports it
        build.build(folder, cpu_class.select(os.environ.get(cpu_class.VARIABLE) or "auto"))
