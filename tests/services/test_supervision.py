"""The services of one `quire serve` live and end together."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.running_quire import RunningQuire

STOP_SECONDS = 120


def test_the_services_end_when_their_supervisor_is_killed(
    quire: Callable[..., RunningQuire], tiny_model: Callable[[str], Path]
) -> None:
    running = quire("--model", str(tiny_model("llama")), "--device-blocks", "32")
    services = [psutil.Process(pid) for pid in running.children().values()]
    assert len(services) == 3
    os.kill(running.process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(services, timeout=STOP_SECONDS)
    assert alive == []
