"""All services under mixed load for a long time: `python -m bench.soak MINUTES`. Fails if a target is missed.

Rounds of load end with a rest, at which nothing may be held. In each round a client is killed, and a service is killed
or stopped, and starts again: the second gateway, the second engine, once the KV manager. The other processes live
through all of it; their growth with each request is judged.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from bench.report.results import Row, publish, row
from bench.report.targets import ROOT
from bench.soak.growth import Growth, growths_of, largest
from bench.soak.load import Load
from bench.soak.samples import Sampler, columns_of
from bench.soak.services import ENGINES, GATEWAYS, MANAGER, NULL_ENGINE, SoakServices
from bench.soak.slopes import AT_REST, LEAST_RESTS, MEMORY, Slopes, slopes_of, worst
from services.models.model_store import default_cache, resolve
from tests.running_quire import COMMAND

MINUTES = 30.0
_MODEL = "demo"
_FOLDER = ROOT / "build" / "soak"
_ROUNDS = 12
_LEAST_ROUND_SECONDS = 20.0
_NULL_ROUNDS = 24
_LEAST_NULL_SECONDS = 6.0
_REST_SECONDS = 60.0
_SETTLE_SECONDS = 2.0
_SERVICES = ("gateway", "engine", "kvmanager")


class Rest(NamedTuple):
    """What was still held when no request ran."""

    seconds: float
    held_blocks: int
    open_streams: int


class Options(NamedTuple):
    """How to soak. `modules` are those of services in place of Quire's own, by label."""

    minutes: float
    publishes: bool
    modules: Mapping[str, str]

    @property
    def is_null(self) -> bool:
        """Whether the engines compute nothing."""
        return self.modules.get("engine") == NULL_ENGINE


def main(options: Options) -> int:
    """Soak, write the results, and return the exit status: 1 unless every target is met."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwinds, so that no process stays
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-soak-"))
        model = str(resolve(_MODEL, default_cache(), lambda *_: None)) if options.is_null else _MODEL
        services = SoakServices(Path(folder), model, options.modules)
        stack.callback(services.close)
        services.start()
        load = Load(services.grpc_addresses, services.http_urls, "unconstrained" if options.is_null else "all")
        stack.callback(load.close)
        sampler = Sampler(services.incarnations)
        stack.callback(sampler.close)
        rests = _soak(services, load, sampler, options)
        run_seconds = time.monotonic() - sampler.begun
    slopes, growths = slopes_of(sampler.samples, run_seconds), growths_of(sampler.samples, run_seconds)
    rows = [*_rows(slopes, growths), *_counts(services, load, rests, run_seconds)]
    publish(
        "soak",
        rows,
        len(rests),
        None if options.publishes else _FOLDER,
        growths=[one.as_json() for one in growths],
        slopes=[one.as_json() for one in slopes],
        rests=[one._asdict() for one in rests],
        requests={kind: dict(counts) for kind, counts in load.counts.items()},
        unexpected=load.unexpected[:20],
        samples=columns_of(sampler.samples),
    )
    return _verdict(rows, growths, load)


def _soak(services: SoakServices, load: Load, sampler: Sampler, options: Options) -> list[Rest]:
    """Run rounds until the time is over."""
    minutes = options.minutes
    rounds, least = (_NULL_ROUNDS, _LEAST_NULL_SECONDS) if options.is_null else (_ROUNDS, _LEAST_ROUND_SECONDS)
    round_seconds = max(least, 60 * minutes / rounds)
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
    sampler.take(load.requests)
    return Rest(round(time.monotonic() - sampler.begun, 1), *held)


def _rows(slopes: list[Slopes], growths: list[Growth]) -> Iterator[Row]:
    for service in _SERVICES:
        growth = largest(growths, service)
        yield row("soak", f"{service}_bytes_per_request", None if growth is None else round(growth, 1), "B")
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


def _verdict(rows: list[Row], growths: list[Growth], load: Load) -> int:
    """Print what each process grew by and which targets are missed; return the exit status."""
    limits = {one.metric: one.target for one in rows}
    for one in growths:
        limit = limits[f"{one.process.partition('-')[0]}_bytes_per_request"]
        assert limit is not None
        print(one.words(limit))
    for answer in load.unexpected[:5]:
        print(f"unexpected: {answer}")
    # Whether the tree was clean and the machine quiet is for publication.
    missed = [one for one in rows if one.met is False]
    for row_ in missed:
        value = (
            f"was not measured in this time, at least {LEAST_RESTS} rests" if row_.value is None else f"{row_.value:g}"
        )
        print(f"missed: {row_.metric}: {value}; at most {row_.target:g}")
    print("failed" if missed else "passed")
    return 1 if missed else 0


def _options() -> Options:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("minutes", type=float, nargs="?", default=MINUTES)
    parser.add_argument("--publish", action="store_true", help="Write bench/results; else build/soak/soak.json.")
    parser.add_argument("--null-engines", action="store_true", help="Engines compute nothing: many more requests.")
    parser.add_argument("--gateway-module", default=COMMAND, help="Module of the gateway's command.")
    given = parser.parse_args()
    engines = {"engine": NULL_ENGINE} if given.null_engines else {}
    return Options(given.minutes, given.publish, {"gateway": given.gateway_module, **engines})


if __name__ == "__main__":
    sys.exit(main(_options()))
