"""A gateway at three times the capacity of its engine: `python -m bench overload [SECONDS]`.

The engine is a real one with a tiny model that starts ten steps a second, like an accelerator whose step takes equally
long for few and for many sequences. Answers have random lengths. The gateway admits as many requests as the engine runs
sequences (`--max-requests 256`), so that none waits in the engine's queue.

Capacity is measured once, in a closed loop; then, in each repetition, requests arrive at random (Poisson) at half of
it, and at three times. The Retry-After of a rejected request is compared with the time until the next later request is
admitted.
"""

import random
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from statistics import median, quantiles
from typing import Any, NamedTuple

from bench.loads.load_client import LEFT, RequestOutcome
from bench.loads.paced_quire import NANO, Clients, Item, paced_quire, prompt_of
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval

REPETITIONS = 5
SECONDS = 30.0
SEQUENCES = MAX_REQUESTS = 256
STEP_SECONDS = 0.1
MEAN_TOKENS, MAX_TOKENS = 128, 512
CLIENTS = 2
LOADS = {"half": 0.5, "over": 3.0}
# Seconds of load before and after the measured ones; the last forecasts need the latter.
BEFORE_SECONDS, AFTER_SECONDS = 10.0, 8.0
TERMS = Terms(processes=3, work=f"a paced tiny model, {1 / STEP_SECONDS:g} steps of {SEQUENCES} sequences a second")
SIDES = {"overload": TERMS, "half load": TERMS}
CODE = (
    *("engine", "services", "protos", "bench/serving/overload.py", "bench/loads/paced_engine.py"),
    *(
        "bench/loads/paced_quire.py",
        "bench/loads/load_client.py",
    ),
)
_WITHIN = 2.0
_REFUSED = "RESOURCE_EXHAUSTED"


class Outcomes(NamedTuple):
    """The requests of one repetition at half load, and at three times the capacity."""

    half: list[RequestOutcome]
    over: list[RequestOutcome]


@dataclass(frozen=True)
class Forecast:
    """Retry time of a rejected request, and actual time until there was room, in seconds since the rejection."""

    after: float  # seconds since the load began
    predicted: float
    actual: float

    @property
    def good(self) -> bool:
        return self.actual / _WITHIN <= self.predicted <= self.actual * _WITHIN


def main(seconds: float) -> None:
    """Measure capacity, then half of it and three times of it in turn, and publish."""
    draw, numbers, runs = random.Random(1), count(), list[Outcomes]()
    blocks = SEQUENCES * (MAX_TOKENS // 16 + 2)
    with paced_quire(STEP_SECONDS, SEQUENCES, blocks, "--max-requests", str(MAX_REQUESTS)) as quire:
        clients = Clients(quire, CLIENTS)
        try:
            outcomes, _ = clients.run(_requests(draw, numbers, 60 * SEQUENCES), _whole(seconds), SEQUENCES)
            capacity = _completion_rate(outcomes, seconds)
            until = _whole(seconds) + AFTER_SECONDS
            for number in repeated(REPETITIONS, "overload", warm_up=False):
                run = {
                    name: clients.run(_poisson(draw, numbers, LOADS[name] * capacity, until), until)[0]
                    for name in in_turn(list(LOADS), number)
                }
                runs.append(Outcomes(run["half"], run["over"]))
        finally:
            clients.close()
    publish("overload", _rows(capacity, runs, seconds), REPETITIONS, code=CODE, **_details(runs, seconds))


def _whole(seconds: float) -> float:
    return BEFORE_SECONDS + seconds


def _requests(draw: random.Random, numbers: Iterator[int], many: int) -> list[Item]:
    return [_request(draw, next(numbers), 0.0) for _ in range(many)]


def _poisson(draw: random.Random, numbers: Iterator[int], rate: float, seconds: float) -> list[Item]:
    """Make requests with Poisson arrivals at a rate per second."""
    requests, at = [], draw.expovariate(rate)
    while at < seconds:
        requests.append(_request(draw, next(numbers), at))
        at += draw.expovariate(rate)
    return requests


def _request(draw: random.Random, number: int, at: float) -> Item:
    tokens = min(MAX_TOKENS, 1 + int(draw.expovariate(1 / MEAN_TOKENS)))
    return {"id": f"r{number}", "at": at, "prompt": prompt_of(number), "tokens": tokens}


def _completion_rate(outcomes: list[RequestOutcome], seconds: float) -> float:
    """Return successful requests per second."""
    begin = outcomes[0].sent + BEFORE_SECONDS / NANO
    return (
        sum(outcome.status == "OK" and begin <= outcome.ended < begin + seconds / NANO for outcome in outcomes)
        / seconds
    )


def _measured(outcomes: list[RequestOutcome], seconds: float) -> list[RequestOutcome]:
    """Return the requests sent during the measured time."""
    begin = outcomes[0].sent + BEFORE_SECONDS / NANO
    return [outcome for outcome in outcomes if begin <= outcome.sent < begin + seconds / NANO]


def _first_token_seconds(outcomes: list[RequestOutcome], seconds: float) -> list[float]:
    """Return the times to first token of admitted requests; those without one count until the end."""
    return [
        (outcome.deltas[0][0] if outcome.deltas else outcome.ended) * NANO - outcome.sent * NANO
        for outcome in _served(_measured(outcomes, seconds))
    ]


def _refused(outcomes: list[RequestOutcome], seconds: float) -> list[RequestOutcome]:
    return [outcome for outcome in _measured(outcomes, seconds) if outcome.status == _REFUSED]


def _forecasts(outcomes: list[RequestOutcome], seconds: float) -> list[Forecast]:
    """Compare the retry time of each rejected request with the time until there was room."""
    admitted = [outcome.sent for outcome in _served(outcomes) if outcome.started]
    found = []
    for outcome in _refused(outcomes, seconds):
        place = bisect_right(admitted, outcome.sent)
        if place < len(admitted):
            assert outcome.retry_seconds is not None, "every rejection must have a retry time"
            since = (outcome.sent - outcomes[0].sent) * NANO
            found.append(Forecast(since, outcome.retry_seconds, (admitted[place] - outcome.ended) * NANO))
    return found


def _rows(capacity: float, runs: list[Outcomes], seconds: float) -> list[Row]:
    figures = [_figures(one, capacity, seconds) for one in runs]
    middle = {name: median(one[name] for one in figures) for name in figures[0]}
    null = null_interval([one["odd_ms"] for one in figures], [one["even_ms"] for one in figures])
    refused = [len(_refused(one.over, seconds)) for one in runs]

    def of(metric: str, value: float, unit: str, **more: Any) -> Row:
        return row("overload", metric, value, unit, terms={"overload": TERMS}, **more)

    ratio = round(middle["ratio"], 3)
    return [
        row("overload", "first_token_over_half_load", ratio, "ratio", "half load", terms=SIDES, null=null),
        of("refusal_p99_ms", round(middle["refusal_p99_ms"], 1), "ms"),
        of("refusal_max_ms", round(max(one["refusal_max_ms"] for one in figures), 1), "ms"),
        of("forecasts_within_a_factor_of_two", round(middle["good_forecasts"], 4), "share"),
        of("capacity_requests_per_second", round(capacity, 2), "1/s"),
        of("first_token_at_half_load_ms", round(middle["half_ms"], 1), "ms"),
        of("first_token_at_overload_ms", round(middle["over_ms"], 1), "ms"),
        of("served_over_capacity", round(middle["served"], 3), "ratio"),
        of("refused_requests", sum(refused), "1"),
    ]


def _figures(run: Outcomes, capacity: float, seconds: float) -> dict[str, float]:
    """Return the figures of a repetition. Noise is the difference of odd and even requests at half load."""
    others = {outcome.status for outcome in run.half + run.over} - {"OK", LEFT, _REFUSED}
    assert not others, f"requests ended with {others}"
    half, over = (_first_token_seconds(outcomes, seconds) for outcomes in run)
    refused = [(outcome.ended - outcome.sent) * NANO for outcome in _refused(run.over, seconds)]
    forecasts = _forecasts(run.over, seconds)
    return {
        "ratio": median(over) / median(half),
        "half_ms": 1000 * median(half),
        "over_ms": 1000 * median(over),
        "odd_ms": 1000 * median(half[1::2]),
        "even_ms": 1000 * median(half[::2]),
        "refusal_p99_ms": 1000 * quantiles(refused, n=100)[98],
        "refusal_max_ms": 1000 * max(refused),
        "good_forecasts": sum(forecast.good for forecast in forecasts) / len(forecasts),
        "served": _completion_rate(run.over, seconds) / capacity,
    }


def _served(outcomes: list[RequestOutcome]) -> list[RequestOutcome]:
    return [outcome for outcome in outcomes if outcome.status in ("OK", LEFT)]


def _details(runs: list[Outcomes], seconds: float) -> dict[str, Any]:
    """Return the values of all repetitions together."""
    half = [one for run in runs for one in _first_token_seconds(run.half, seconds)]
    over = [one for run in runs for one in _first_token_seconds(run.over, seconds)]
    refused = [(one.ended - one.sent) * NANO for run in runs for one in _refused(run.over, seconds)]
    forecasts = [asdict(one) for run in runs for one in _forecasts(run.over, seconds)]
    return {
        "forecasts": [{name: round(value, 3) for name, value in one.items()} for one in forecasts],
        "first_token_seconds_at_half_load": [round(one, 4) for one in half],
        "first_token_seconds_at_overload": [round(one, 4) for one in over],
        "refusal_seconds": [round(one, 4) for one in refused],
    }


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
