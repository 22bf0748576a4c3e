"""Tokens per second of beams and of samples, compared with as many greedy answers: the demo model in bfloat16."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

from bench.loads.engine_worker import BFLOAT16, demo_parts, terms_of
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from engine.run.loop import Engine
from engine.schedule.request import BeamSearch, Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from services.engine.startup.assembly import EngineParts
from tests.in_process import InProcessBlocks

PROMPT_TOKENS, NEW_TOKENS = 64, 32
WIDTHS = (2, 4, 6)
REPETITIONS = 5
CODE = ("blocks", "engine", "kvmanager", "services/engine", "bench/engine/decoding.py")
GREEDY = Sampling(temperature=0.0)

# Makes requests of one decoding method with a given total number of sequences.
Way = Callable[[int], list[Request]]


def main() -> None:
    """Measure all methods at all widths in each repetition, greedy answers twice, and publish medians."""
    parts = demo_parts(256, **BFLOAT16)
    seconds: dict[tuple[str, int], list[float]] = {(name, width): [] for width in WIDTHS for name in WAYS}
    for number in repeated(REPETITIONS, "decoding"):
        for width in WIDTHS:
            for name in in_turn([*WAYS], number):
                spent = _decode_seconds(parts, WAYS[name](width))
                seconds[name, width] += [spent] if number else []
    rows = [one for width in WIDTHS for one in rows_of(seconds, width, terms_of(parts, f"{width} sequences"))]
    publish("decoding", rows, REPETITIONS, code=CODE, seconds=_named(seconds))


def rows_of(seconds: dict[tuple[str, int], list[float]], width: int, terms: Terms) -> list[Row]:
    """Return tokens per second of each method, all sequences together, and the ratio to greedy.

    All methods run on one engine, on its terms.
    """
    tokens, greedy = width * (NEW_TOKENS - 1), seconds["greedy", width]
    null, rows = null_interval(greedy, seconds["again", width]), []
    for name in _COMPARED:
        rate = round(tokens / median(seconds[name, width]), 2)
        rows.append(row("decoding", f"{name}_{width}_tokens_per_second", rate, "1/s", terms={name: terms}))
    for name in _COMPARED[1:]:
        ratio = round(median(one / own for one, own in zip(greedy, seconds[name, width], strict=True)), 3)
        both = {name: terms, "greedy": terms}
        rows.append(row("decoding", f"{name}_{width}_over_greedy", ratio, "ratio", "greedy", terms=both, null=null))
    return rows


def _greedy(width: int) -> list[Request]:
    return [Request(f"r{number}", _prompt(number), GREEDY, Stopping(NEW_TOKENS)) for number in range(width)]


def _samples(width: int) -> list[Request]:
    return [Request("r", _prompt(0), Sampling(seed=1), Stopping(NEW_TOKENS), samples=((),) * width)]


def _beams(width: int) -> list[Request]:
    return [Request("r", _prompt(0), GREEDY, Stopping(NEW_TOKENS), beam_search=BeamSearch(width))]


WAYS: dict[str, Way] = {"greedy": _greedy, "again": _greedy, "samples": _samples, "beams": _beams}
_COMPARED = ("greedy", "samples", "beams")


def _prompt(number: int) -> tuple[int, ...]:
    return tuple(range(1000 + number, 1000 + number + PROMPT_TOKENS))


def _decode_seconds(parts: EngineParts, requests: list[Request]) -> float:
    """Return the seconds from when all have a first token until the end, without a network."""
    scheduler = Scheduler(parts.scheduler.capacity, parts.scheduler.limits)
    engine = Engine(scheduler, parts.runner, InProcessBlocks(scheduler.capacity), perf_counter)
    for request in requests:
        scheduler.requests.submit(request)
    while scheduler.totals.generated_tokens < len(requests):
        engine.turn()
    begun = perf_counter()
    while not scheduler.empty:
        engine.turn()
    return perf_counter() - begun


def _named(seconds: dict[tuple[str, int], list[float]]) -> dict[str, list[float]]:
    return {f"{name}_{width}": values for (name, width), values in seconds.items()}


if __name__ == "__main__":
    main()
