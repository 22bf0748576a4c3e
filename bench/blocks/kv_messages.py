"""The effect of hostile messages to the KV manager on another engine and on the manager's memory.

A neighbour in another process sends one small block step after the other. Its slowest block step during a message is
compared with its slowest block step in an equally long time without messages.
"""

import time
from statistics import median

from bench.report.results import publish, repeated, row
from bench.report.terms import Terms
from tests.running_quire import RunningService
from tests.services.kvmanager.hostile_messages import Hostile, Neighbour, reset_peak, resident_mib, send, shapes

REPETITIONS = 5
CODE = (
    *("kvmanager", "protos", "services/kvmanager", "services/wire", "services/runtime", "bench/blocks/kv_messages.py"),
    *("tests/services/kvmanager/hostile_messages.py",),
)
TERMS = {"quire": Terms(processes=3, work="a small Step at a time, beside a hostile message")}
_MIN_SECONDS = 0.2

# The slowest block step alone, the slowest block step during the message, and the growth of the manager's memory.
Run = tuple[float, float, float]


def main() -> None:
    """Measure all shapes, and publish the worst."""
    service = RunningService("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "0", "--map-listen", "")
    neighbour = Neighbour(service.address)
    try:
        runs: dict[str, list[Run]] = {}
        for _ in repeated(REPETITIONS, "Messages", warm_up=False):
            for hostile in shapes():
                runs.setdefault(hostile.name, []).append(_measure(service, neighbour, hostile))
    finally:
        neighbour.close()
        service.close()
    alone = median(alone for several in runs.values() for alone, _, _ in several)
    added = {name: median(beside for _, beside, _ in several) - alone for name, several in runs.items()}
    growth = {name: max(grown for _, _, grown in several) for name, several in runs.items()}
    rows = [
        row("kv_messages", "slowest_step_alone_ms", round(alone, 2), "ms", terms=TERMS),
        row("kv_messages", "slowest_step_added_ms", round(max(added.values()), 2), "ms", terms=TERMS),
        row("kv_messages", "memory_growth_mib", round(max(growth.values()), 1), "MiB", terms=TERMS),
    ]
    publish("kv_messages", rows, REPETITIONS, code=CODE, runs=runs, added_ms=added, growth_mib=growth)


def _measure(service: RunningService, neighbour: Neighbour, hostile: Hostile) -> Run:
    pid = service.process.pid
    before = resident_mib(pid)
    reset_peak(pid)
    neighbour.waits()
    begun = time.monotonic()
    send(service.address, hostile)
    time.sleep(max(0.0, begun + _MIN_SECONDS - time.monotonic()))
    seconds = time.monotonic() - begun
    beside, _ = neighbour.waits()
    growth = resident_mib(pid, "VmHWM") - before
    time.sleep(seconds)
    alone, _ = neighbour.waits()
    return alone, beside, growth


if __name__ == "__main__":
    main()
