"""The processes of an engine's ranks."""

import psutil


def workers_of(pid: int) -> list[int]:
    """Process ids of the other ranks."""
    return [child.pid for child in psutil.Process(pid).children() if _is_worker(child)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "services.engine.ranks.worker_process" in process.cmdline()
    except psutil.NoSuchProcess:  # psutil's ZombieProcess is one
        return False
