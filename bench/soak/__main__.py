"""All services under mixed load for a long time: `python -m bench.soak MINUTES`.

Rounds of load end with a rest, at which nothing may be held. In each round a client is killed, and a service is killed
or stopped, and starts again: the second gateway, the second engine, once the KV manager. The other processes live
through all of it; their slopes are judged.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.report.results import Row, publish, row
from bench.soak.load import Load
from bench.soak.samples import Sampler, columns_of
from bench.soak.services import ENGINES, GATEWAYS, MANAGER, SoakServices
from bench.soak.slopes import AT_REST, MEMORY, Slopes, slopes_of, worst

MINUTES = 30.0
_MODEL = "demo"
_ROUNDS = 12
_LEAST_ROUND_SECONDS = 20.0
_REST_SECONDS = 60.0
_SETTLE_SECONDS = 2.0
_SERVICES = ("gateway", "engine", "kvmanager")


class Rest(NamedTuple):
    """What was still held when no request ran."""

    seconds: float
    held_blocks: int
    open_streams: int


def main(minutes: float) -> None:
    """Soak, and publish."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds, so that no process stays
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-soak-"))
        services = SoakServices(Path(folder), _MODEL)
        stack.callback(services.close)
        services.start()
        load = Load(services.grpc_addresses, services.http_urls)
        stack.callback(load.close)
        sampler = Sampler(services.incarnations)
        stack.callback(sampler.close)
        rests = _soak(services, load, sampler, minutes)
        run_seconds = time.monotonic() - sampler.begun
    slopes = slopes_of(sampler.samples, run_seconds)
    publish(
        "soak",
        [*_rows(slopes), *_counts(services, load, rests, run_seconds)],
        1,
        slopes=[one.as_json() for one in slopes],
        rests=[one._asdict() for one in rests],
        requests={kind: dict(counts) for kind, counts in load.counts.items()},
        unexpected=load.unexpected[:20],
        samples=columns_of(sampler.samples),
    )
    _say_flat(slopes)


def _soak(services: SoakServices, load: Load, sampler: Sampler, minutes: float) -> list[Rest]:
    """Run rounds until the time is over."""
    round_seconds = max(_LEAST_ROUND_SECONDS, 60 * minutes / _ROUNDS)
    end = time.monotonic() + 60 * minutes
    rests: list[Rest] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[doing]}"))
    with Progress(*columns) as progress:
        task = progress.add_task("Soak", total=60 * minutes, doing="")
        for number, disruption in zip(count(), _disruptions(services), strict=False):
            begun = time.monotonic()
            for doing in _round(load, disruption, round_seconds):
                progress.update(task, completed=60 * minutes - (end - time.monotonic()), doing=f"{number}: {doing}")
            rests.append(_rest(services, load, sampler))
            # The last rest is the end: no round that would not be whole begins.
            if time.monotonic() + (time.monotonic() - begun) / 2 > end:
                return rests
    return rests


def _round(load: Load, disruption: "Disruption", seconds: float) -> Iterator[str]:
    """Run one round of load, with a killed client and a disruption within; yield what it does, each second."""
    begun = time.monotonic()
    load.run()
    due = [(0.2, load.kill_one, "a client is killed"), (0.4, disruption.act, disruption.words)]
    while (gone := time.monotonic() - begun) < seconds:
        if due and gone >= due[0][0] * seconds:
            _, act, words = due.pop(0)
            yield words
            act()
        yield "load"
        time.sleep(1)


class Disruption(NamedTuple):
    """Something done to a service during load."""

    words: str
    act: Any


def _disruptions(services: SoakServices) -> Iterator[Disruption]:
    """Yield a disruption for each round. The manager is killed once, early: its successor is judged."""
    gateway, engine = GATEWAYS[1], ENGINES[1]
    yield Disruption("nothing", lambda: None)
    yield Disruption("the KV manager is killed", lambda: services.kill(MANAGER))
    while True:
        yield Disruption(f"{engine} is killed", lambda: services.kill(engine))
        yield Disruption(f"{gateway} is stopped", lambda: services.terminate(gateway))
        yield Disruption(f"{engine} is stopped", lambda: services.terminate(engine))
        yield Disruption(f"{gateway} is killed", lambda: services.kill(gateway))


def _rest(services: SoakServices, load: Load, sampler: Sampler) -> Rest:
    """Wait until no request runs, and take a sample of each process."""
    load.rest()
    deadline = time.monotonic() + _REST_SECONDS
    while (held := (services.held_blocks(), services.open_streams())) != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(_SETTLE_SECONDS)  # closed connections leave the services
    sampler.take(resting=True)
    return Rest(round(time.monotonic() - sampler.begun, 1), *held)


def _rows(slopes: list[Slopes]) -> Iterator[Row]:
    for service in _SERVICES:
        for metric in (*MEMORY, *AT_REST):
            value = worst(slopes, service, metric)
            unit = "MiB/min" if metric in MEMORY else "1/min"
            yield row("soak", f"{service}_{metric}_slope", None if value is None else round(value, 3), unit)


def _counts(services: SoakServices, load: Load, rests: list[Rest], run_seconds: float) -> Iterator[Row]:
    yield row("soak", "held_blocks_at_rest", max(one.held_blocks for one in rests), "1")
    yield row("soak", "open_streams_at_rest", max(one.open_streams for one in rests), "1")
    yield row("soak", "unexpected_answers", len(load.unexpected), "1")
    yield row("soak", "minutes", round(run_seconds / 60, 1), "min")
    yield row("soak", "requests", load.requests, "1")
    yield row("soak", "rests", len(rests), "1")
    yield row("soak", "killed_clients", load.killed, "1")
    yield row("soak", "killed_services", services.kills, "1")
    yield row("soak", "stopped_services", services.terminations, "1")


def _say_flat(slopes: list[Slopes]) -> None:
    """Print for each judged process whether it is flat."""
    for one in slopes:
        if one.judged:
            steep = ", ".join(name for name, value in one.per_minute.items() if not _is_flat(one.process, name, value))
            print(f"{one.process}: {f'not flat: {steep}' if steep else 'flat'}")


def _is_flat(process: str, metric: str, slope: float | None) -> bool:
    return row("soak", f"{process.partition('-')[0]}_{metric}_slope", slope, "").met is not False


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else MINUTES)
