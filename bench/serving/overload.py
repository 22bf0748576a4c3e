"""A gateway at three times the capacity of its engine: `python -m bench overload [SECONDS]`.

The engine is a real one with a tiny model, whose steps begin five times a second: with its 256 sequences it is as an
accelerator would be, whose step takes as long for few sequences as for many. Answers are of random length. The gateway
takes as many requests as the engine runs sequences (`--max-requests 256`), so that none waits in the engine's queue.

Capacity is measured in a closed loop; then come requests at random moments (Poisson) at half of it, and at three times.
A refused request is told when there is room again; there was, when the first one was sent after it that was let in.
"""

import random
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from statistics import median, quantiles
from typing import Any

from bench.loads.load_client import LEFT, Fate
from bench.loads.paced_quire import NANO, Clients, Item, paced_quire, prompt_of
from bench.report.results import Row, publish, row

SECONDS = 60.0
SEQUENCES = MAX_REQUESTS = 256
STEP_SECONDS = 0.2
MEAN_TOKENS, MOST_TOKENS = 128, 512
CLIENTS = 2
HALF, OVER = 0.5, 3.0
# Seconds of load before and after the measured ones, so that the last forecasts can be judged.
BEFORE_SECONDS, AFTER_SECONDS = 20.0, 15.0
_WITHIN = 2.0
_REFUSED = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True)
class Forecast:
    """The retry time of a refused request, and the time until there was room, in seconds since the refusal."""

    after: float  # seconds since the load began
    told: float
    found: float

    @property
    def good(self) -> bool:
        return self.found / _WITHIN <= self.told <= self.found * _WITHIN


def main(seconds: float) -> None:
    """Measure capacity, half of it and three times of it, and publish."""
    draw, numbers = random.Random(1), count()
    blocks = SEQUENCES * (MOST_TOKENS // 16 + 2)
    with paced_quire(STEP_SECONDS, SEQUENCES, blocks, "--max-requests", str(MAX_REQUESTS)) as quire:
        clients = Clients(quire, CLIENTS)
        try:
            fates, _ = clients.run(_requests(draw, numbers, 60 * SEQUENCES), _whole(seconds), SEQUENCES)
            capacity = _rate_of_ends(fates, seconds)
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
    tokens = min(MOST_TOKENS, 1 + int(draw.expovariate(1 / MEAN_TOKENS)))
    return {"id": f"r{number}", "at": at, "prompt": prompt_of(number), "tokens": tokens}


def _rate_of_ends(fates: list[Fate], seconds: float) -> float:
    """Return how many requests ended well, a second."""
    begin = fates[0].sent + BEFORE_SECONDS / NANO
    return sum(fate.status == "OK" and begin <= fate.ended < begin + seconds / NANO for fate in fates) / seconds


def _measured(fates: list[Fate], seconds: float) -> list[Fate]:
    """Return the requests that were sent in the time that counts."""
    begin = fates[0].sent + BEFORE_SECONDS / NANO
    return [fate for fate in fates if begin <= fate.sent < begin + seconds / NANO]


def _first_token_seconds(fates: list[Fate], seconds: float) -> list[float]:
    """Return the waits of admitted requests; those that still waited at the end count until then."""
    return [
        (fate.deltas[0][0] if fate.deltas else fate.ended) * NANO - fate.sent * NANO
        for fate in _served(_measured(fates, seconds))
    ]


def _refused(fates: list[Fate], seconds: float) -> list[Fate]:
    return [fate for fate in _measured(fates, seconds) if fate.status == _REFUSED]


def _forecasts(fates: list[Fate], seconds: float) -> list[Forecast]:
    """Compare the retry time of each refused request with the time until there was room."""
    let_in = [fate.sent for fate in _served(fates) if fate.started]
    found = []
    for fate in _refused(fates, seconds):
        place = bisect_right(let_in, fate.sent)
        if place < len(let_in):
            assert fate.retry_seconds is not None, "every refusal says when to come again"
            since = (fate.sent - fates[0].sent) * NANO
            found.append(Forecast(since, fate.retry_seconds, (let_in[place] - fate.ended) * NANO))
    return found


def _rows(capacity: float, half: list[Fate], over: list[Fate], seconds: float) -> list[Row]:
    alone, loaded = (median(_first_token_seconds(fates, seconds)) for fates in (half, over))
    refused = [(fate.ended - fate.sent) * NANO for fate in _refused(over, seconds)]
    forecasts = _forecasts(over, seconds)
    good = sum(forecast.good for forecast in forecasts) / len(forecasts)
    others = {fate.status for fate in half + over} - {"OK", LEFT, _REFUSED}
    assert not others, f"requests ended with {others}"
    return [
        row("overload", "first_token_over_half_load", round(loaded / alone, 3), "ratio"),
        row("overload", "refusal_p99_ms", round(1000 * quantiles(refused, n=100)[98], 1), "ms"),
        row("overload", "refusal_max_ms", round(1000 * max(refused), 1), "ms"),
        row("overload", "forecasts_within_a_factor_of_two", round(good, 4), "share"),
        row("overload", "capacity_requests_per_second", round(capacity, 2), "1/s"),
        row("overload", "first_token_at_half_load_ms", round(1000 * alone, 1), "ms"),
        row("overload", "first_token_at_overload_ms", round(1000 * loaded, 1), "ms"),
        row("overload", "served_over_capacity", round(_rate_of_ends(over, seconds) / capacity, 3), "ratio"),
        row("overload", "refused_requests", len(refused), "1"),
    ]


def _served(fates: list[Fate]) -> list[Fate]:
    return [fate for fate in fates if fate.status in ("OK", LEFT)]


def _details(half: list[Fate], over: list[Fate], seconds: float) -> dict[str, Any]:
    return {
        "forecasts": [
            {name: round(value, 3) for name, value in asdict(one).items()} for one in _forecasts(over, seconds)
        ],
        "first_token_seconds_at_half_load": [round(one, 4) for one in _first_token_seconds(half, seconds)],
        "first_token_seconds_at_overload": [round(one, 4) for one in _first_token_seconds(over, seconds)],
        "refusal_seconds": [round((fate.ended - fate.sent) * NANO, 4) for fate in _refused(over, seconds)],
    }


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
