"""A gateway at three times the capacity of its engine: `python -m bench overload [SECONDS]`.

The engine is a real one with a tiny model that starts five steps a second, like an accelerator whose step takes equally
long for few and for many sequences. Answers have random lengths. The gateway admits as many requests as the engine runs
sequences (`--max-requests 256`), so that none waits in the engine's queue.

Capacity is measured in a closed loop; then requests arrive at random (Poisson) at half of it, and at three times. The
Retry-After of a rejected request is compared with the time until the next later request is admitted.
"""

import random
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from statistics import median, quantiles
from typing import Any

from bench.loads.load_client import LEFT, RequestOutcome
from bench.loads.paced_quire import NANO, Clients, Item, paced_quire, prompt_of
from bench.report.results import Row, publish, row

SECONDS = 60.0
SEQUENCES = MAX_REQUESTS = 256
STEP_SECONDS = 0.2
MEAN_TOKENS, MAX_TOKENS = 128, 512
CLIENTS = 2
HALF, OVER = 0.5, 3.0
# Seconds of load before and after the measured ones; the last forecasts need the latter.
BEFORE_SECONDS, AFTER_SECONDS = 20.0, 15.0
_WITHIN = 2.0
_REFUSED = "RESOURCE_EXHAUSTED"


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
    """Measure capacity, half of it and three times of it, and publish."""
    draw, numbers = random.Random(1), count()
    blocks = SEQUENCES * (MAX_TOKENS // 16 + 2)
    with paced_quire(STEP_SECONDS, SEQUENCES, blocks, "--max-requests", str(MAX_REQUESTS)) as quire:
        clients = Clients(quire, CLIENTS)
        try:
            outcomes, _ = clients.run(_requests(draw, numbers, 60 * SEQUENCES), _whole(seconds), SEQUENCES)
            capacity = _completion_rate(outcomes, seconds)
            until = _whole(seconds) + AFTER_SECONDS
            half, _ = clients.run(_poisson(draw, numbers, HALF * capacity, until), until)
            over, _ = clients.run(_poisson(draw, numbers, OVER * capacity, until), until)
        finally:
            clients.close()
    publish("overload", _rows(capacity, half, over, seconds), 1, **_details(half, over, seconds))


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


def _rows(capacity: float, half: list[RequestOutcome], over: list[RequestOutcome], seconds: float) -> list[Row]:
    alone, loaded = (median(_first_token_seconds(outcomes, seconds)) for outcomes in (half, over))
    refused = [(outcome.ended - outcome.sent) * NANO for outcome in _refused(over, seconds)]
    forecasts = _forecasts(over, seconds)
    good = sum(forecast.good for forecast in forecasts) / len(forecasts)
    others = {outcome.status for outcome in half + over} - {"OK", LEFT, _REFUSED}
    assert not others, f"requests ended with {others}"
    return [
        row("overload", "first_token_over_half_load", round(loaded / alone, 3), "ratio"),
        row("overload", "refusal_p99_ms", round(1000 * quantiles(refused, n=100)[98], 1), "ms"),
        row("overload", "refusal_max_ms", round(1000 * max(refused), 1), "ms"),
        row("overload", "forecasts_within_a_factor_of_two", round(good, 4), "share"),
        row("overload", "capacity_requests_per_second", round(capacity, 2), "1/s"),
        row("overload", "first_token_at_half_load_ms", round(1000 * alone, 1), "ms"),
        row("overload", "first_token_at_overload_ms", round(1000 * loaded, 1), "ms"),
        row("overload", "served_over_capacity", round(_completion_rate(over, seconds) / capacity, 3), "ratio"),
        row("overload", "refused_requests", len(refused), "1"),
    ]


def _served(outcomes: list[RequestOutcome]) -> list[RequestOutcome]:
    return [outcome for outcome in outcomes if outcome.status in ("OK", LEFT)]


def _details(half: list[RequestOutcome], over: list[RequestOutcome], seconds: float) -> dict[str, Any]:
    return {
        "forecasts": [
            {name: round(value, 3) for name, value in asdict(one).items()} for one in _forecasts(over, seconds)
        ],
        "first_token_seconds_at_half_load": [round(one, 4) for one in _first_token_seconds(half, seconds)],
        "first_token_seconds_at_overload": [round(one, 4) for one in _first_token_seconds(over, seconds)],
        "refusal_seconds": [round((outcome.ended - outcome.sent) * NANO, 4) for outcome in _refused(over, seconds)],
    }


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
