"""500 streams at once through one gateway process, at a steady pace: `python -m bench streams [SECONDS]`.

The engine is a real one with a tiny model, whose 500 sequences generate a token in each step; steps start at a steady
pace. The gateway's delay is the time from the engine's send to the client's receipt of a token, by one machine's clock.
All tokens of a step arrive at the gateway in one message, so the last of 500 clients is served after 499 others.
Clients are separate processes.

This is repeated. Then the pace rises until delays grow, or the engine cannot keep it.
"""

import json
import sys
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, quantiles

from bench.loads.load_client import RequestOutcome
from bench.loads.paced_quire import NANO, Clients, Item, PacedQuire, paced_quire, prompt_of
from bench.report.results import Row, publish, repeated, row
from bench.report.terms import Terms

STREAMS, TOKENS_PER_SECOND = 500, 4.0
REPETITIONS = 5
SECONDS = 60.0
LEVELS = (6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0)
LEVEL_SECONDS = 12.0
RAMP_SECONDS = 8.0  # until all streams run, with a margin
CLIENTS = 2
MIB = 1024 * 1024
TERMS = {"quire": Terms(processes=3, work=f"a paced tiny model, {STREAMS} streams", start="cold")}
CODE = (
    *("engine", "services", "protos", "bench/serving/streams.py", "bench/loads/paced_engine.py"),
    *(
        "bench/loads/paced_quire.py",
        "bench/loads/load_client.py",
    ),
)
# Of a repetition: the figure, its row's name and its unit.
_ROWS = (
    ("longest_gap_seconds", "longest_gap_seconds", "s"),
    ("memory_growth_share", "memory_growth_share", "share"),
    ("delay_p50_ms", "added_delay_p50_ms", "ms"),
    ("delay_p99_ms", "added_delay_p99_ms", "ms"),
    ("gateway_cpu_us_per_token", "gateway_cpu_us_per_token", "us"),
    ("client_cpu_us_per_token", "client_cpu_us_per_token", "us"),
    ("tokens_per_second", "tokens_per_second", "1/s"),
    ("memory_mib", "gateway_memory_mib", "MiB"),
)
# A queue grows if delays rise by more than this share of a step from the first third to the last.
_GROWTH = 0.25
_PACE_KEPT = 0.97
_MAX_SECONDS = 300.0


@dataclass(frozen=True)
class Sample:
    """The gateway's resource use at a time in nanoseconds of the machine's monotonic clock."""

    at: int
    cpu_seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Window:
    """Start and end of the measured time, in nanoseconds."""

    begin: int
    end: int

    def holds(self, at: int) -> bool:
        return self.begin <= at < self.end

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) * NANO


Delays = list[tuple[int, float]]  # send time of a token, and seconds until its receipt


def main(seconds: float) -> None:
    """Measure the steady pace several times, then higher ones, and publish."""
    steady = [measured(TOKENS_PER_SECOND, seconds) for _ in repeated(REPETITIONS, "streams", warm_up=False)]
    levels = [steady[0]]
    for rate in LEVELS:
        levels.append(measured(rate, min(seconds, LEVEL_SECONDS)))
        if not _holds(levels[-1]):
            break
    publish("streams", rows_of(steady, levels), REPETITIONS, code=CODE, steady=steady, levels=levels)


def rows_of(steady: list[dict[str, float]], levels: list[dict[str, float]]) -> list[Row]:
    """Return medians of the repetitions, but the longest of all pauses, and the highest pace."""
    highest = max((level["tokens_per_second"] for level in levels if _holds(level)), default=None)
    combined = {name: median(one[name] for one in steady) for name, _, _ in _ROWS}
    combined["longest_gap_seconds"] = max(one["longest_gap_seconds"] for one in steady)
    rows = [row("streams", metric, round(combined[name], 4), unit, terms=TERMS) for name, metric, unit in _ROWS]
    return [*rows, row("streams", "highest_steady_tokens_per_second", highest, "1/s", terms=TERMS)]


def _holds(level: dict[str, float]) -> bool:
    """Return True if no queue grew, and the engine kept its pace."""
    return level["delay_growth_of_a_step"] <= _GROWTH and level["pace_kept"] >= _PACE_KEPT


def measured(rate: float, seconds: float) -> dict[str, float]:
    """Run all streams for `seconds`, each at `rate` tokens a second."""
    tokens = round(rate * (seconds + RAMP_SECONDS + 2))
    requests = [
        {"id": f"s{n}", "at": 2.0 * n / STREAMS, "prompt": prompt_of(n), "tokens": tokens} for n in range(STREAMS)
    ]
    with paced_quire(1 / rate, STREAMS, STREAMS * (tokens // 16 + 3)) as quire:
        clients = Clients(quire, CLIENTS)
        try:
            outcomes, client_cpu, samples = _run(quire, clients, requests)
        finally:
            clients.close()
        quire.gateway.close()
        quire.engine.close()
        sent = sent_times(quire)
    assert {outcome.status for outcome in outcomes} == {"OK"}
    begin = outcomes[0].sent + int(RAMP_SECONDS / NANO)
    return _figures(outcomes, sent, samples, Window(begin, begin + int(seconds / NANO)), rate) | {
        "client_cpu_us_per_token": round(client_cpu * 1e6 / (tokens * STREAMS), 1)
    }


def _run(quire: PacedQuire, clients: Clients, requests: list[Item]) -> tuple[list[RequestOutcome], float, list[Sample]]:
    samples: list[Sample] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            samples.append(Sample(time.monotonic_ns(), quire.cpu_seconds(), quire.memory_bytes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        outcomes, client_cpu = clients.run(requests, until=_MAX_SECONDS)
    finally:
        over.set()
        watcher.join()
    return outcomes, client_cpu, samples


def sent_times(quire: PacedQuire) -> dict[str, list[int]]:
    """Return when the engine sent each token of each request."""
    times: dict[str, list[int]] = {}
    for line in quire.sent_file.read_text().splitlines():
        at, requests = json.loads(line)
        for request_id, count in requests:
            times.setdefault(request_id, []).extend([at] * count)
    return times


def _figures(
    outcomes: list[RequestOutcome], sent: dict[str, list[int]], samples: list[Sample], window: Window, rate: float
) -> dict[str, float]:
    delays = sorted(delay for outcome in outcomes for delay in _delays(outcome, sent[outcome.id], window))
    seconds = [delay for _, delay in delays]
    third = len(seconds) // 3
    growth = fmean(seconds[-third:]) - fmean(seconds[:third])
    inside = [sample for sample in samples if window.holds(sample.at)]
    cpu = (inside[-1].cpu_seconds - inside[0].cpu_seconds) / ((inside[-1].at - inside[0].at) * NANO)
    memory = [sample.memory_bytes for sample in inside]
    tokens_per_second = len(delays) / window.seconds
    centiles = quantiles(seconds, n=1000)
    return {
        "tokens_per_second_of_a_stream": rate,
        "tokens_per_second": round(tokens_per_second, 1),
        "pace_kept": round(tokens_per_second / (STREAMS * rate), 4),
        "delay_p50_ms": round(1000 * median(seconds), 2),
        "delay_p99_ms": round(1000 * centiles[989], 2),
        "delay_p999_ms": round(1000 * centiles[998], 2),
        "delay_growth_of_a_step": round(growth * rate, 4),
        "longest_gap_seconds": round(max(_longest_gap(outcome, window) for outcome in outcomes), 3),
        "gateway_cpu_us_per_token": round(cpu * 1e6 / tokens_per_second, 1),
        "gateway_cpu_share": round(cpu, 3),
        "memory_mib": round(max(memory) / MIB, 1),
        "memory_growth_share": round(memory[-1] / memory[0] - 1, 4),
    }


def _delays(outcome: RequestOutcome, sent: list[int], window: Window) -> Delays:
    got = [at for at, count in outcome.deltas for _ in range(count)]
    return [(begun, (at - begun) * NANO) for begun, at in zip(sent, got, strict=True) if window.holds(begun)]


def _longest_gap(outcome: RequestOutcome, window: Window) -> float:
    times = [window.begin, *(at for at, _ in outcome.deltas if window.holds(at)), window.end]
    return max(after - before for before, after in pairwise(times)) * NANO


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
