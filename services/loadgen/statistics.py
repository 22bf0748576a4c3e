"""Figures of a run's records; docs/benchmarking.md explains each."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.loadgen.records import Record
from services.loadgen.workload.load import Bounds

Values = NDArray[np.floating[Any]]

_REFUSALS = ("RESOURCE_EXHAUSTED", "429")
_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Spread:
    """Mean, percentiles (linear between values, as numpy's) and maximum of `count` values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Objectives:
    """Latency limits of a good request, in seconds; None: no limit.

    `ttft` limits the time to the first token, `itl` each gap between tokens, `tpot` the mean time per output token,
    `e2e` the time to the last token.
    """

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """The limits that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Latencies:
    """Latencies of completed requests, in seconds; None if no request has such a value."""

    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    normalized: Spread | None
    queued: Spread | None


@dataclass(frozen=True)
class Refusals:
    """Requests refused by a full server: the times until the refusal, and the retry times."""

    count: int
    seconds_to_answer: Spread | None
    with_retry_after: int
    retry_after_seconds: Spread | None


@dataclass(frozen=True)
class Goodput:
    """Completed requests that met all objectives, as a share of all sent requests, and per second."""

    objectives: dict[str, float]
    requests: int
    share: float
    requests_per_second: float


@dataclass(frozen=True)
class Summary:
    """Summary of a run. Requests of the warm-up count only in `warmup_requests`.

    Throughput is that of completed requests over `seconds`: from the first one sent to the last one's end.
    """

    seconds: float
    requests: int
    completed: int
    warmup_requests: int
    failures: dict[str, int]
    input_tokens: int
    output_tokens: int
    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    peak_output_tokens_per_second: float
    most_in_flight: int
    latencies: Latencies
    goodput: Goodput | None
    cached_tokens: int | None
    prefix_hit_rate: float | None
    preemptions: int | None
    recomputed_tokens: int | None
    failovers: int | None
    refusals: Refusals
    other_lengths: int
    late_seconds: Spread | None

    def as_json(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        return asdict(self)


def counted(records: Iterable[Record], bounds: Bounds) -> list[Record]:
    """Return the records after the warm-up, in the order of sending."""
    in_order = sorted(records, key=lambda record: record.sent)
    return [record for record in in_order[bounds.warmup_requests :] if record.sent >= bounds.warmup_seconds]


def summarize(records: Sequence[Record], bounds: Bounds, objectives: Objectives = Objectives()) -> Summary:
    """Summarize all records of a run."""
    measured = counted(records, bounds)
    done = [record for record in measured if record.completed]
    seconds = _seconds(measured)
    inputs, outputs = sum(_input_tokens(one) for one in done), sum(one.output_tokens for one in done)
    cached = _total(record.usage.cached_tokens for record in done)
    return Summary(
        seconds=seconds,
        requests=len(measured),
        completed=len(done),
        warmup_requests=len(records) - len(measured),
        failures=dict(Counter(record.status for record in measured if not record.completed).most_common()),
        input_tokens=inputs,
        output_tokens=outputs,
        requests_per_second=_rate(len(done), seconds),
        input_tokens_per_second=_rate(inputs, seconds),
        output_tokens_per_second=_rate(outputs, seconds),
        peak_output_tokens_per_second=_peak(done),
        most_in_flight=_most_in_flight(measured),
        latencies=latencies(done),
        goodput=_goodput(measured, objectives, seconds) if objectives.given else None,
        cached_tokens=cached,
        prefix_hit_rate=None if cached is None or not inputs else cached / inputs,
        preemptions=_total(record.usage.preemptions for record in done),
        recomputed_tokens=_total(record.usage.recomputed_tokens for record in done),
        failovers=_total(record.usage.failovers for record in done),
        refusals=_refusals(measured),
        other_lengths=sum(record.output_tokens != record.asked_tokens for record in done),
        late_seconds=spread(record.sent - record.due for record in measured),
    )


def latencies(done: Sequence[Record]) -> Latencies:
    """Return the latencies of completed requests."""
    answered = [record for record in done if record.times]
    gaps = [gaps_of(record) for record in answered]
    return Latencies(
        ttft=spread(record.times[0] - record.sent for record in answered),
        itl=spread(joined(gaps)),
        tpot=spread(float(own.mean()) for own in gaps if len(own)),
        e2e=spread(record.ended - record.sent for record in done),
        normalized=spread((record.ended - record.sent) / record.output_tokens for record in answered),
        queued=spread(one.usage.queued_seconds for one in done if one.usage.queued_seconds is not None),
    )


def gaps_of(record: Record) -> Values:
    """Return the seconds between consecutive tokens.

    The time between two messages is divided by the tokens of the second; gaps within the first message are 0.
    """
    times, counts = np.array(record.times), np.array(record.counts)
    if not len(times):
        return np.empty(0)
    between = np.repeat(np.diff(times) / counts[1:], counts[1:])
    return np.concatenate((np.zeros(counts[0] - 1), between))


def spread(values: Iterable[float]) -> Spread | None:
    """Return mean, percentiles and maximum of values; None without values."""
    made = np.fromiter(values, np.float64) if not isinstance(values, np.ndarray) else values
    if not len(made):
        return None
    p50, p90, p95, p99 = map(float, np.percentile(made, _PERCENTILES))
    return Spread(len(made), float(made.mean()), p50, p90, p95, p99, float(made.max()))


def joined(arrays: Iterable[Values]) -> Values:
    """Concatenate arrays; there may be none."""
    return np.concatenate([np.empty(0), *arrays])


def in_flight(starts: Values, ends: Values) -> tuple[Values, NDArray[np.int64]]:
    """Return the times at which intervals begin or end, and the number of open intervals from each time on."""
    moments = np.concatenate((starts, ends))
    steps = np.concatenate((np.ones(len(starts), np.int64), -np.ones(len(ends), np.int64)))
    # At equal times, ends precede starts.
    order = np.lexsort((steps, moments))
    return moments[order], np.cumsum(steps[order])


def tokens_over_time(records: Sequence[Record], width: float) -> tuple[Values, Values]:
    """Return the starts of time slices of `width` seconds, and the tokens per second in each."""
    times = joined(np.array(record.times) for record in records)
    counts = joined(np.array(record.counts) for record in records)
    if not len(times):
        return np.empty(0), np.empty(0)
    sums: Values = np.bincount((times / width).astype(np.int64), counts).astype(np.float64)
    starts: Values = np.arange(len(sums), dtype=np.float64) * width
    return starts, sums / width


def _seconds(measured: Sequence[Record]) -> float:
    if not measured:
        return 0.0
    return max(record.ended for record in measured) - min(record.sent for record in measured)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _peak(done: Sequence[Record]) -> float:
    """Return the maximum number of tokens received in one second of the run."""
    _, rates = tokens_over_time(done, 1.0)
    return float(rates.max()) if len(rates) else 0.0


def _most_in_flight(measured: Sequence[Record]) -> int:
    _, open_then = in_flight(np.array([one.sent for one in measured]), np.array([one.ended for one in measured]))
    return int(open_then.max()) if len(open_then) else 0


def _input_tokens(record: Record) -> int:
    counted = record.usage.prompt_tokens
    return record.input_tokens if counted is None else counted


def _total(values: Iterable[int | None]) -> int | None:
    """Return the sum of servers' values; None if one is missing."""
    given = list(values)
    known = [value for value in given if value is not None]
    return sum(known) if given and len(known) == len(given) else None


def _goodput(measured: Sequence[Record], objectives: Objectives, seconds: float) -> Goodput:
    good = sum(_is_good(record, objectives) for record in measured)
    return Goodput(objectives.given, good, good / len(measured) if measured else 0.0, _rate(good, seconds))


def _is_good(record: Record, objectives: Objectives) -> bool:
    if not record.completed or not record.times:
        return False
    gaps = gaps_of(record)
    values = {
        "ttft": record.times[0] - record.sent,
        "itl": float(gaps.max()) if len(gaps) else 0.0,
        "tpot": float(gaps.mean()) if len(gaps) else 0.0,
        "e2e": record.ended - record.sent,
    }
    return all(values[name] <= limit for name, limit in objectives.given.items())


def _refusals(measured: Sequence[Record]) -> Refusals:
    refused = [record for record in measured if record.status in _REFUSALS and not record.times]
    delays = [record.retry_after for record in refused if record.retry_after is not None]
    return Refusals(len(refused), spread(one.ended - one.sent for one in refused), len(delays), spread(delays))
