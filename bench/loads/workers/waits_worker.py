"""An engine's loop for `bench waits`: who waits for whom, on virtual time without a model, or on a CPU with one.

For each line of work, as JSON, it prints figures as JSON. It runs the code on the path, so that an earlier commit runs
the same worker. Virtual steps take what `VirtualRunner` says; the block manager answers within the step, as usual.
"""

import os

# As in the engine's process, and before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.loads.memory import DATA_VARIABLE, DataMissing
from bench.papers.simulation.simulated_runner import VirtualClock
from blocks import Step
from engine.run.loop import Engine
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.outputs import Finished, Tokens
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Done, Launched, Runner, Sampled, StepPlan
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts, assemble
from services.models.model_store import default_cache, resolve
from tests.in_process import InProcessBlocks
from tests.tiny_models import make_tiny_model

BLOCK_SIZE = 16
VOCABULARY = 1 << 24
TOKEN_BUDGET, MAX_SEQUENCES = 512, 64
# Seconds of a virtual step, for each of its tokens, and for each token that a decoding sequence reads: a step of 512
# tokens takes 0.28 s, as the demo model's on two cores.
STEP_SECONDS, TOKEN_SECONDS, CONTEXT_SECONDS = 0.02, 0.0005, 2e-7
SHARED_TOKENS, SHARED_REQUESTS = 1000, 64
ROOMY_BLOCKS = 16_384
# Copies of the agents' sessions, each with its own salt, in a pool that does not hold all of them.
COPIES, AGENT_BLOCKS = 8, 6_000
MOONCAKE_REQUESTS, MOONCAKE_BLOCKS, MOONCAKE_BLOCK, MOONCAKE_PACE = 400, 40_000, 512, 20.0
SHORT_TOKENS, BURST = 64, 8
GREEDY = Sampling(temperature=0.0)
LONG = "long"


class Arriving(NamedTuple):
    """A request, and when it arrives. `after`: not before this request has ended."""

    at: float
    request: Request
    after: str = ""


@dataclass
class Seen:
    """What a run showed. Times are seconds since its begin."""

    arrived: dict[str, float] = field(default_factory=dict)
    first_token: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    longest_step: float = 0.0
    busy: float = 0.0  # seconds in steps
    admissions: int = 0  # answers that admit

    def waits(self, names: Iterable[str]) -> list[float]:
        """Return the times to the first tokens, sorted."""
        return sorted(self.first_token[name] - self.arrived[name] for name in names)


class VirtualRunner:
    """Runs steps in virtual time; every token is 0."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def launch(self, plan: StepPlan) -> Launched:
        """Run a step."""
        tokens = sum(len(work.token_ids) for work in plan.work)
        context = sum(work.end for work in plan.work if len(work.token_ids) == 1)
        seconds = STEP_SECONDS + TOKEN_SECONDS * tokens + CONTEXT_SECONDS * context
        self._clock.advance_to(self._clock.now + seconds)
        return Done([Sampled(0) for work in plan.work for _ in range(work.outcomes)])


class ServedLoad:
    """Serves arriving requests with an engine's loop."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float], sleep: Callable[[float], None]
    ):
        self._clock, self._sleep = clock, sleep
        self._scheduler = scheduler
        self._blocks = InProcessBlocks(scheduler.capacity, lambda step, _: self._count(step))
        self._engine = Engine(scheduler, runner, self._blocks, clock)
        self.seen = Seen()

    def serve(self, arriving: Sequence[Arriving], until: str = "") -> Seen:
        """Serve requests until all have ended, or this one; return what was seen of them."""
        self.seen, begun = Seen(), self._clock()
        waiting = sorted(arriving, key=lambda one: one.at)
        while (waiting or not self._scheduler.empty) and until not in self.seen.ended:
            now = self._clock() - begun
            for one in [one for one in waiting if one.at <= now and (not one.after or one.after in self.seen.ended)]:
                waiting.remove(one)
                self.seen.arrived[one.request.request_id] = max(one.at, self.seen.ended.get(one.after, 0.0))
                self._scheduler.requests.submit(one.request)
            before = self._clock()
            turn = self._engine.turn()
            assert self._engine.last_failure is None
            if turn.step is not None:
                self.seen.busy += turn.step.ran
                self.seen.longest_step = max(self.seen.longest_step, turn.step.ran)
            for output in turn.outputs:
                if isinstance(output, Tokens):
                    self.seen.first_token.setdefault(output.request_id, self._clock() - begun)
                elif isinstance(output, Finished):
                    self.seen.ended[output.request_id] = self._clock() - begun
            if not turn.progressed and self._clock() == before and waiting:
                self._sleep(max(1e-4, min(one.at for one in waiting) - (self._clock() - begun)))
        return self.seen

    def end(self, name: str) -> None:
        """Cancel a request."""
        self._scheduler.requests.cancel(name)
        while not self._scheduler.empty:
            self._engine.turn()

    def _count(self, step: Step) -> None:
        self.seen.admissions += bool(step.allocates)


def limits_of(**given: Any) -> Limits:
    """Return the limits that an engine on a CPU has by default, as far as the code on the path has them."""
    usual = EngineSettings(token_budget=TOKEN_BUDGET, max_sequences=MAX_SEQUENCES).limits()
    own = {one.name: getattr(usual, one.name) for one in fields(Limits)}
    return Limits(**{**own, **given})


def virtual_run(blocks: int) -> tuple[ServedLoad, Scheduler]:
    """Return a run on virtual time in an empty pool."""
    clock = VirtualClock()
    scheduler = Scheduler(Capacity(1 << 18, VOCABULARY, BLOCK_SIZE, blocks), limits_of(max_waiting=1 << 20))
    return ServedLoad(
        scheduler, VirtualRunner(clock), clock, lambda seconds: clock.advance_to(clock.now + seconds)
    ), scheduler


def request(name: str, prompt: Sequence[int], max_tokens: int, salt: str = "") -> Request:
    """Return a greedy request."""
    return Request(name, tuple(prompt), GREEDY, Stopping(max_tokens), salt=salt.encode())


# Prefixes.


def behind_prefixes(*, shared: bool, cached: bool) -> dict[str, float]:
    """Serve 64 requests at once that share a prompt of 1,000 tokens, or that each have their own."""
    run, scheduler = virtual_run(ROOMY_BLOCKS)
    prefixes = [
        [1 + (0 if shared else number) * SHARED_TOKENS + place for place in range(SHARED_TOKENS)]
        for number in range(SHARED_REQUESTS)
    ]
    if cached:
        run.serve([Arriving(0.0, request(f"cached{number}", prefix, 1)) for number, prefix in enumerate(prefixes)])
    computed = scheduler.totals.computed_tokens
    names = [f"r{number}" for number in range(SHARED_REQUESTS)]
    seen = run.serve(
        [
            Arriving(0.0, request(name, [*prefix, VOCABULARY - 1 - number], 8))
            for number, (name, prefix) in enumerate(zip(names, prefixes, strict=True))
        ]
    )
    own = SHARED_REQUESTS * (1 + SHARED_TOKENS % BLOCK_SIZE + 7)  # tokens that each computes itself
    return {
        "answers": seen.admissions,
        "first_token_p50": median(seen.waits(names)),
        "prefix_computed_times": (scheduler.totals.computed_tokens - computed - own) / SHARED_TOKENS,
    }


# Traces.


def _rows(name: str) -> list[dict[str, Any]]:
    if not (folder := os.environ.get(DATA_VARIABLE, "")):
        raise DataMissing(f"{DATA_VARIABLE} names no folder with {name}")
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def agents() -> dict[str, float]:
    """Serve copies of the agents' sessions, each call once the one before has ended."""
    arriving, previous = [], dict[str, str]()
    for number, one in enumerate(_rows("agent_sessions.jsonl")):
        for copy in range(COPIES):
            session, name = f"{one['session']}-{copy}", f"r{number}-{copy}"
            prompt = _prompt(one["block_ids"], BLOCK_SIZE, one["input_length"])
            at = one["timestamp_ms"] / 1000 + copy * 0.7
            made = request(name, prompt, one["output_length"], salt=str(copy))
            arriving.append(Arriving(at, made, previous.get(session, "")))
            previous[session] = name
    return _figures(arriving, AGENT_BLOCKS)


def mooncake() -> dict[str, float]:
    """Serve the begin of the Mooncake trace, slower, because the pool is that of one engine."""
    arriving = []
    for number, one in enumerate(_rows("mooncake_conversation.jsonl")[:MOONCAKE_REQUESTS]):
        prompt = _prompt(one["hash_ids"], MOONCAKE_BLOCK, one["input_length"])
        made = request(f"r{number}", prompt, one["output_length"])
        arriving.append(Arriving(one["timestamp"] / 1000 * MOONCAKE_PACE, made))
    return _figures(arriving, MOONCAKE_BLOCKS)


def _prompt(blocks: Sequence[int], size: int, length: int) -> list[int]:
    tokens = [(block * size + place) % VOCABULARY for block in blocks for place in range(size)]
    return (tokens + [VOCABULARY - 1] * length)[:length]


def _figures(arriving: Sequence[Arriving], blocks: int) -> dict[str, float]:
    run, scheduler = virtual_run(blocks)
    seen, totals = run.serve(arriving), scheduler.totals
    return {
        "hit_rate": totals.cached_tokens / totals.prompt_tokens,
        "tokens_per_second": totals.generated_tokens / max(seen.ended.values()),
        "preemptions": totals.preemptions,
        "recomputed_share": totals.recomputed_tokens / totals.computed_tokens,
    }


# A long prompt and short ones, with a model.


class LongPrompt(NamedTuple):
    """The size of the long prompt and of the pool, and the model."""

    model: str
    tokens: int
    blocks: int


LONG_PROMPTS = {"tiny": LongPrompt("long-llama", 60_000, 6_000), "demo": LongPrompt("demo", 8_000, 2_000)}


@cache
def parts_of(name: str) -> EngineParts:
    """Return an engine of a model on the CPU."""
    one = LONG_PROMPTS[name]
    if one.model == "demo":
        model = resolve("demo", default_cache(), lambda *_: None)
    else:
        model = make_tiny_model(one.model, Path(tempfile.mkdtemp(prefix="quire-waits-")))
    kernels = str(default_cache().parent / "kernels")
    return assemble(EngineSettings(model=str(model), device_blocks=one.blocks, kernels_folder=kernels))


def beside(name: str, every: float, seconds: float, *, long: bool, short: bool) -> dict[str, Any]:
    """Serve bursts of short prompts `every` so many seconds, a long prompt, or both until the long one has its token.

    Without a long prompt the bursts go on for `seconds`.
    """
    parts, one = parts_of(name), LONG_PROMPTS[name]
    limits = limits_of()
    scheduler = Scheduler(parts.scheduler.capacity, limits)
    run = ServedLoad(scheduler, parts.runner, time.monotonic, time.sleep)
    arriving = []
    if long:
        arriving.append(Arriving(0.0, request(LONG, _tokens(one.tokens, 0), 1)))
    bursts = int(seconds / every) if short else 0
    names = [f"s{number}" for number in range(bursts * BURST)]
    arriving += [
        Arriving(0.1 + number // BURST * every, request(short_name, _tokens(SHORT_TOKENS, number + 1), 1))
        for number, short_name in enumerate(names)
    ]
    seen = run.serve(arriving, until=LONG if long else "")
    waits = seen.waits([short_name for short_name in names if short_name in seen.first_token])
    return {
        "busy_share": seen.busy / max(seen.ended.values()),
        "longest_step": seen.longest_step,
        "long_seconds": seen.first_token.get(LONG),
        "p50": median(waits) if waits else None,
        "p99": waits[int(0.99 * (len(waits) - 1))] if waits else None,
        "count": len(waits),
    }


def _tokens(count: int, number: int) -> list[int]:
    """Return tokens that no other prompt begins with."""
    return [3 + (number * 7919 + place * (1 + number % 13)) % 250 for place in range(count)]


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "behind_prefixes": behind_prefixes,
    "agents": agents,
    "mooncake": mooncake,
    "beside": beside,
}


def main() -> None:
    """Answer each line of work."""
    print(json.dumps({"name": "engine"}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        print(json.dumps(CASES[work.pop("case")](**work)), flush=True)


if __name__ == "__main__":
    main()
