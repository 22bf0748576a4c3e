"""Tokens per second of beams and of samples, compared with as many greedy answers."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

from rich.progress import Progress

from bench.report.results import Row, publish, row
from engine.run.loop import Engine
from engine.schedule.request import BeamSearch, Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts, assemble
from services.models.model_store import default_cache, resolve
from tests.in_process import InProcessBlocks

PROMPT_TOKENS, NEW_TOKENS = 64, 32
WIDTHS = (2, 4, 6)
REPETITIONS = 5
GREEDY = Sampling(temperature=0.0)

# Makes requests of one decoding method with a given total number of sequences.
Way = Callable[[int], list[Request]]


def main() -> None:
    """Measure all methods at all widths in each repetition, and publish medians."""
    folder = resolve("demo", default_cache(), lambda *_: None)
    parts = assemble(EngineSettings(model=str(folder), device_blocks=256))
    cases = [(name, width) for width in WIDTHS for name in WAYS]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    with Progress() as progress:
        task = progress.add_task("decoding", total=REPETITIONS * len(cases))
        for _ in range(REPETITIONS):
            for name, width in cases:
                seconds[name, width].append(_decode_seconds(parts, WAYS[name](width)))
                progress.advance(task)
    publish(
        "decoding", [one for width in WIDTHS for one in _rows(seconds, width)], REPETITIONS, seconds=_named(seconds)
    )


def _rows(seconds: dict[tuple[str, int], list[float]], width: int) -> list[Row]:
    """Return tokens per second of each method, all sequences together, and the ratio to greedy."""
    tokens = width * (NEW_TOKENS - 1)
    rows = [
        row("decoding", f"{name}_{width}_tokens_per_second", round(tokens / median(seconds[name, width]), 2), "1/s")
        for name in WAYS
    ]
    for name in WAYS:
        if name != "greedy":
            ratios = [greedy / own for greedy, own in zip(seconds["greedy", width], seconds[name, width], strict=True)]
            rows.append(row("decoding", f"{name}_{width}_over_greedy", round(median(ratios), 3), "ratio", "greedy"))
    return rows


def _greedy(width: int) -> list[Request]:
    return [Request(f"r{number}", _prompt(number), GREEDY, Stopping(NEW_TOKENS)) for number in range(width)]


def _samples(width: int) -> list[Request]:
    return [Request("r", _prompt(0), Sampling(seed=1), Stopping(NEW_TOKENS), samples=((),) * width)]


def _beams(width: int) -> list[Request]:
    return [Request("r", _prompt(0), GREEDY, Stopping(NEW_TOKENS), beam_search=BeamSearch(width))]


WAYS: dict[str, Way] = {"greedy": _greedy, "samples": _samples, "beams": _beams}


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
