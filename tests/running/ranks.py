"""The processes of an engine's ranks."""

import subprocess


def workers_of(pid: int) -> list[int]:
    """Process ids of the other ranks."""
    children = subprocess.run(
        ["ps", "--no-headers", "-o", "pid,args", "--ppid", str(pid)], capture_output=True, text=True
    ).stdout.splitlines()
    return [int(line.split()[0]) for line in children if "worker_process" in line]
