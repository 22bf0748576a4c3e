"""Runs each case in a process of its own, which ends with its time or its memory.

The processes are forked from one that has imported torch and transformers, because importing them takes seconds.
"""

import multiprocessing
import os
import resource
import signal
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from tests.model_types.cases import Case
from tests.model_types.judgement import Judge, Judgement

TOO_LONG = Judgement("too long")
# A process that has sent its judgement frees what it shares with others.
LEAVING_SECONDS = 5.0
PRELOADED = ["tests.model_types.judgement", "transformers.generation", "transformers.modeling_utils"]


class Bounds(NamedTuple):
    """What one case may take."""

    seconds: float = 120.0
    memory_mib: int = 4096


def judged(chosen: Iterable[Case], judge: Judge, bounds: Bounds, jobs: int) -> Iterator[tuple[Case, Judgement]]:
    """Judge cases, `jobs` at the same time; yield each when it is done. An exception at a yield drops the others."""
    pool = ThreadPoolExecutor(jobs)
    tries = {pool.submit(judged_apart, case, judge, bounds): case for case in chosen}
    try:
        for done in as_completed(tries):
            yield tries[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def judged_apart(case: Case, judge: Judge, bounds: Bounds) -> Judgement:
    """Judge a case in a process of its own. Whatever becomes of that process is an outcome."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="quire-model-types-") as folder:
        process = context.Process(target=_work, args=(theirs, case, judge, Path(folder), bounds), daemon=True)
        process.start()
        theirs.close()
        try:
            found = _received(ours, bounds)
            process.join(LEAVING_SECONDS if found and found.outcome != TOO_LONG.outcome else 0)
            return found or Judgement("crash", f"its process ended with {_ended(process)}")
        finally:
            _end_group(process)


def _received(connection: Connection, bounds: Bounds) -> Judgement | None:
    """Wait for the judgement of a process; None if it ended without."""
    if not connection.poll(bounds.seconds):
        return TOO_LONG._replace(reason=f"more than {bounds.seconds:g} seconds")
    try:
        judgement: Judgement = connection.recv()
    except EOFError:
        return None
    return judgement


def _work(connection: Connection, case: Case, judge: Judge, folder: Path, bounds: Bounds) -> None:
    os.setsid()
    _silence()
    limit = bounds.memory_mib << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import torch

    torch.set_num_threads(1)
    try:
        judgement = judge(case, folder / case.model_type)
    except MemoryError:
        judgement = Judgement("crash", f"it takes more than {bounds.memory_mib} MiB")
    except BaseException as error:
        judgement = Judgement("crash", f"{type(error).__name__}: {' '.join(str(error).split())}"[:240].rstrip())
    connection.send(judgement)
    connection.close()


def _silence() -> None:
    """Drop what libraries print: bars of progress, and warnings of configurations that are small on purpose."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123 - a file of the system
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)


def _ended(process: multiprocessing.process.BaseProcess) -> str:
    process.join()
    code = process.exitcode or 0
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _end_group(process: multiprocessing.process.BaseProcess) -> None:
    """End a process and what it started. It may not have its group yet."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()
    process.join()
