"""Samples of what each process holds: memory, file descriptors, threads, and series of metrics."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.scrape import Scrape

SECONDS = 10.0
_MIB = 1 << 20
_COLUMNS = ("seconds", "resting", "requests", "rss_mib", "anonymous_mib", "file_descriptors", "threads", "series")


class Incarnation(NamedTuple):
    """A running process of a service; each restart has the next number."""

    process: str
    number: int
    pid: int
    metrics_url: str


@dataclass(frozen=True)
class ProcessSample:
    """What a process held at one moment. At rest no request runs, and `requests` of the load have ended; else None.

    Anonymous memory is what it has allocated; of resident memory the kernel drops pages of files at will.
    """

    process: str
    incarnation: int
    seconds: float
    resting: bool
    rss_mib: float
    anonymous_mib: float
    file_descriptors: int
    threads: int
    series: int
    requests: int | None = None


class Sampler:
    """Takes samples of all running processes every few seconds, in a thread."""

    def __init__(self, running: Callable[[], Iterable[Incarnation]]) -> None:
        self.samples: list[ProcessSample] = []
        self.begun = time.monotonic()
        self._running = running
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self, requests: int | None = None) -> None:
        """Take a sample of each process; at rest, with the number of requests. One that ends meanwhile has none."""
        for one in self._running():
            try:
                self.samples.append(self._sample(one, requests))
            except (psutil.Error, OSError):
                continue

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(SECONDS):
            self.take()

    def _sample(self, one: Incarnation, requests: int | None) -> ProcessSample:
        series = len(Scrape.of(one.metrics_url).samples)
        process = psutil.Process(one.pid)
        return ProcessSample(
            one.process,
            one.number,
            round(time.monotonic() - self.begun, 2),
            requests is not None,
            round(process.memory_info().rss / _MIB, 3),
            round(_anonymous_bytes(one.pid) / _MIB, 3),
            process.num_fds(),
            process.num_threads(),
            series,
            requests,
        )


def columns_of(samples: Iterable[ProcessSample]) -> dict[str, dict[str, list[float | None]]]:
    """Return the columns of each incarnation, by process and number."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for one in samples:
        columns = found.setdefault(f"{one.process} {one.incarnation}", {})
        for name in _COLUMNS:
            columns.setdefault(name, []).append(getattr(one, name))
    return found


def _anonymous_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024
