"""Time per token by context length: with the KV cache, and with the whole context recomputed for each token.

One request at a time on the demo model in bfloat16, with the engine in process. All contexts are prefixes of the same
text, so after the first repetition their blocks are cached and the engine only decodes. Without a cache each token is
measured as a prefill of its whole context.
"""

import random
from statistics import correlation, linear_regression, median
from time import perf_counter

from bench.loads.engine_worker import BFLOAT16, demo_parts, terms_of
from bench.report.results import Row, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from engine.run.loop import Engine
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from services.engine.startup.assembly import EngineParts
from tests.in_process import InProcessBlocks

REPETITIONS = 5
CONTEXTS = (128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192)
FIRST_FITTED = 1024
RECOMPUTED = (128, 256, 512, 1024, 2048)
DECODED = 17  # an untimed first token and 16 timed ones at the end of the context
DEVICE_BLOCKS = 1024
CODE = ("blocks", "engine", "kvmanager", "services/engine", "bench/engine/context.py")

Seconds = dict[int, list[float]]


def main() -> None:
    """Measure both, and publish medians and the line through them."""
    parts = demo_parts(DEVICE_BLOCKS, **BFLOAT16)
    draw = random.Random(1)
    text = tuple(draw.randrange(10, parts.loaded.vocabulary_size) for _ in range(max(CONTEXTS)))
    cached = _cached(parts, text)
    recomputed, again = _recomputed(parts, text)
    terms = terms_of(parts, "a token")
    rows = [_latency("with_cache", context, cached, terms) for context in CONTEXTS]
    rows += [_latency("recomputed", context, recomputed, terms) for context in RECOMPUTED]
    rows += _fit({context: median(cached[context]) for context in CONTEXTS}, terms)
    rows += _growth(cached, recomputed, again, terms)
    publish("context", rows, REPETITIONS, code=CODE, with_cache_seconds=cached, recomputed_seconds=recomputed)


def _latency(way: str, context: int, seconds: Seconds, terms: Terms) -> Row:
    value = round(1000 * median(seconds[context]), 3)
    return row("context", f"{way}_{context}_milliseconds_per_token", value, "ms", terms={way: terms})


def _fit(medians: dict[int, float], terms: Terms) -> list[Row]:
    """Fit a line to the medians of the longer contexts; return R^2 and the slope."""
    fitted = [context for context in medians if context >= FIRST_FITTED]
    values, own = [medians[context] for context in fitted], {"quire": terms}
    slope = linear_regression(fitted, values).slope
    growth = round(medians[2048] / medians[128], 3)
    return [
        row("context", "linear_fit_r2", round(correlation(fitted, values) ** 2, 4), "1", terms=own),
        row("context", "nanoseconds_per_token_of_context", round(slope * 1e9, 1), "ns", terms=own),
        row("context", "with_cache_2048_over_128", growth, "ratio", "128 tokens", terms=own),
    ]


def _growth(cached: Seconds, recomputed: Seconds, again: Seconds, terms: Terms) -> list[Row]:
    """Return how recomputation grows, and how it compares with the cache."""
    null = null_interval(recomputed[2048], again[2048])
    growth = round(median(recomputed[2048]) / median(recomputed[128]), 3)
    times = round(median(recomputed[2048]) / median(cached[2048]), 1)
    both = {"recomputed": terms, "with the cache": terms}
    metrics = {
        "recomputed_2048_over_128": (growth, "128 tokens"),
        "recomputed_over_with_cache_at_2048": (times, "with the cache"),
    }
    return [
        row("context", metric, value, "ratio", peer, terms=both, null=null) for metric, (value, peer) in metrics.items()
    ]


def _cached(parts: EngineParts, text: tuple[int, ...]) -> Seconds:
    """Return the seconds of each token decoded at the end of each context."""
    seconds: Seconds = {context: [] for context in CONTEXTS}
    engine = engine_of(parts)
    for number in repeated(REPETITIONS, "with the cache"):  # number 0 fills it
        for context in CONTEXTS:
            times = decoded_at(engine, text[:context])
            seconds[context] += times if number else []
    return seconds


def _recomputed(parts: EngineParts, text: tuple[int, ...]) -> tuple[Seconds, Seconds]:
    """Return the seconds of one token after each context, without a cache, twice in each repetition."""
    both: tuple[Seconds, Seconds] = ({context: [] for context in RECOMPUTED}, {context: [] for context in RECOMPUTED})
    for number in repeated(REPETITIONS, "without a cache"):
        for context in RECOMPUTED:
            for seconds in both:
                spent = recomputed_at(parts, text[:context])
                seconds[context] += [spent] if number else []
    return both


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
