"""Time per token by context length: with the KV cache, and with the whole context recomputed for each token.

One request at a time on the demo model, with the engine in process. All contexts are prefixes of the same text, so
after the first repetition their blocks are cached and the engine only decodes. Without a cache each token is measured
as a prefill of its whole context.
"""

import random
from statistics import correlation, linear_regression, median
from time import perf_counter

from bench.loads.engine_worker import demo_parts
from bench.report.results import Row, publish, row, track
from engine.run.loop import Engine
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from services.engine.startup.assembly import EngineParts
from tests.in_process import InProcessBlocks

REPETITIONS = 5
RECOMPUTATIONS = 3
CONTEXTS = (128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192)
FIRST_FITTED = 1024
RECOMPUTED = (128, 256, 512, 1024, 2048)
DECODED = 17  # an untimed first token and 16 timed ones at the end of the context
DEVICE_BLOCKS = 1024

Seconds = dict[int, list[float]]


def main() -> None:
    """Measure both, and publish medians and the line through them."""
    parts = demo_parts(DEVICE_BLOCKS)
    draw = random.Random(1)
    text = tuple(draw.randrange(10, parts.loaded.vocabulary_size) for _ in range(max(CONTEXTS)))
    cached, recomputed = _cached(parts, text), _recomputed(parts, text)
    rows = [_latency("with_cache", context, cached) for context in CONTEXTS]
    rows += [_latency("recomputed", context, recomputed) for context in RECOMPUTED]
    rows += _fit({context: median(cached[context]) for context in CONTEXTS})
    rows.append(row("context", "recomputed_2048_over_128", _growth(recomputed), "ratio", "128 tokens"))
    times = median(a / b for a, b in zip(sorted(recomputed[2048]), sorted(cached[2048]), strict=False))
    rows.append(row("context", "recomputed_over_with_cache_at_2048", round(times, 1), "ratio", "with the cache"))
    publish("context", rows, REPETITIONS, with_cache_seconds=cached, recomputed_seconds=recomputed)


def _latency(way: str, context: int, seconds: Seconds) -> Row:
    return row("context", f"{way}_{context}_milliseconds_per_token", round(1000 * median(seconds[context]), 3), "ms")


def _fit(medians: dict[int, float]) -> list[Row]:
    """Fit a line to the medians of the longer contexts; return R^2 and the slope."""
    fitted = [context for context in medians if context >= FIRST_FITTED]
    values = [medians[context] for context in fitted]
    slope = linear_regression(fitted, values).slope
    return [
        row("context", "linear_fit_r2", round(correlation(fitted, values) ** 2, 4), "1"),
        row("context", "nanoseconds_per_token_of_context", round(slope * 1e9, 1), "ns"),
        row("context", "with_cache_2048_over_128", round(medians[2048] / medians[128], 3), "ratio", "128 tokens"),
    ]


def _growth(seconds: Seconds) -> float:
    return round(median(seconds[2048]) / median(seconds[128]), 3)


def _cached(parts: EngineParts, text: tuple[int, ...]) -> Seconds:
    """Return the seconds of each token decoded at the end of each context."""
    seconds: Seconds = {context: [] for context in CONTEXTS}
    engine = engine_of(parts)
    for repetition in track(range(REPETITIONS + 1), "with the cache"):  # the first fills it
        for context in CONTEXTS:
            times = decoded_at(engine, text[:context])
            seconds[context] += times if repetition else []
    return seconds


def _recomputed(parts: EngineParts, text: tuple[int, ...]) -> Seconds:
    """Return the seconds of one token after each context, without a cache."""
    seconds: Seconds = {context: [] for context in RECOMPUTED}
    for repetition in track(range(RECOMPUTATIONS + 1), "without a cache"):  # the first warms up
        for context in RECOMPUTED:
            spent = recomputed_at(parts, text[:context])
            if repetition:
                seconds[context].append(spent)
    return seconds


def decoded_at(engine: Engine, context: tuple[int, ...], decoded: int = DECODED) -> list[float]:
    """Decode `decoded` tokens up to the length of a context; return the seconds of each but the first."""
    return decode(engine, Request(f"r{len(context)}", context[: len(context) - decoded], GREEDY, Stopping(decoded)))


def recomputed_at(parts: EngineParts, context: tuple[int, ...]) -> float:
    """Return the seconds of one token after a context that is computed for it."""
    engine = engine_of(parts)
    begun = perf_counter()
    decode(engine, Request("r", context, GREEDY, Stopping(1)))
    return perf_counter() - begun


GREEDY = Sampling(temperature=0.0)


def engine_of(parts: EngineParts) -> Engine:
    """Return an engine in process, with an empty cache."""
    scheduler = Scheduler(parts.scheduler.capacity, parts.scheduler.limits)
    return Engine(scheduler, parts.runner, InProcessBlocks(scheduler.capacity), perf_counter)


def decode(engine: Engine, request: Request) -> list[float]:
    """Run a request to its end; return the seconds of each of its tokens but the first."""
    scheduler = engine.scheduler
    first = scheduler.totals.generated_tokens + 1
    scheduler.requests.submit(request)
    seconds = []
    while not scheduler.empty:
        before, begun = scheduler.totals.generated_tokens, perf_counter()
        engine.turn()
        assert engine.last_failure is None
        if first <= before < scheduler.totals.generated_tokens:
            seconds.append(perf_counter() - begun)
    return seconds


if __name__ == "__main__":
    main()
