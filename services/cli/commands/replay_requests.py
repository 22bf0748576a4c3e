"""Runs recorded requests through the engine's scheduler and the KV manager's core, without model and network.

Time is counted in steps: one for each that the scheduler plans. Where nothing is live, it jumps to the next arrival.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, quantiles
from typing import Any

import kvmanager
from blocks import Allocate, Step, StepResult
from engine.errors import RequestRefused
from engine.run.loop import Engine
from engine.run.record import RecordedRequest, RecordSettings
from engine.run.replay import STOP_TOKEN, ReplayRunner, SampleTokens, SyntheticTokens
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits, Preemption
from engine.schedule.outputs import Finished
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler

_ANY = 2**31 - 1  # tokens of context, ids of the vocabulary, requests that wait: without bounds


class SchedulerStalled(Exception):
    """Requests are live, but the scheduler makes no progress: a bug in the scheduler."""


def _figure(label: str) -> Any:
    return field(metadata={"label": label})


@dataclass(frozen=True)
class Figures:
    """Results of a replay. Tokens are counted as by the engine's metrics, completion in steps from arrival to end.

    `waste` is the share of the held blocks' slots in which no token was, averaged over the steps in which blocks were
    held. A request with several samples is one, and complete when all are. Requests are `refused` that the pool could
    never hold, and `left_out` when they ended without a token.
    """

    requests: int = _figure("requests")
    refused: int = _figure("requests that the pool could never hold")
    left_out: int = _figure("requests left out: they ended without a token")
    prompt_tokens: int = _figure("prompt tokens")
    hit_tokens: int = _figure("prompt tokens found in the prefix cache")
    hit_rate: float = _figure("hit rate")
    output_tokens: int = _figure("tokens generated")
    preemptions: int = _figure("preemptions")
    recomputed_tokens: int = _figure("tokens recomputed")
    swapped_tokens: int = _figure("tokens swapped out")
    peak_held_blocks: int = _figure("blocks held at the peak")
    waste: float = _figure("granted slots that held no token")
    completion_steps_mean: float = _figure("steps to completion, mean")
    completion_steps_p50: float = _figure("steps to completion, median")
    completion_steps_p99: float = _figure("steps to completion, 99th percentile")
    steps: int = _figure("steps in all")


class _CoreBlocks:
    """The KV manager's core as the engine's block manager; results arrive at the next turn."""

    def __init__(self, spec: kvmanager.PoolSpec, *, prefix_cache: bool) -> None:
        self.manager = kvmanager.KVManager(epoch=1)
        self.session = self.manager.attach(spec)
        self.ready = True
        self._prefix_cache = prefix_cache
        self._answers: deque[StepResult] = deque()

    def send(self, step: Step) -> None:
        if not self._prefix_cache:
            step = replace(step, allocates=[_alone(one, step.step) for one in step.allocates])
        self._answers.append(self.manager.apply(self.session, step).result)

    def receive(self) -> StepResult | None:
        return self._answers.popleft() if self._answers else None


def _alone(allocate: Allocate, step: int) -> Allocate:
    """Give each allocate a unique salt, also after a preemption."""
    return allocate._replace(salt=f"{allocate.sequence} {step}".encode())


# The samples of one request, submitted together.
_Samples = Sequence[RecordedRequest]


def _submissions(requests: Sequence[RecordedRequest]) -> list[_Samples]:
    """Return the samples that are submitted together, in order of arrival; those without tokens are left out.

    Those of a request share its prompt. Beams, and samples that were resumed at different lengths, run alone.
    """
    submitted: dict[tuple[int, ...], list[RecordedRequest]] = {}
    for one in sorted((one for one in requests if one.output_tokens), key=lambda one: one.number):
        alone = one.number if one.decoding == "beam" else -1
        submitted.setdefault((one.request, one.prompt_tokens, one.max_tokens, alone), []).append(one)
    return list(submitted.values())


class RequestsReplay:
    """One run of recorded requests; `run` it once."""

    def __init__(
        self,
        settings: RecordSettings,
        requests: Sequence[RecordedRequest],
        recorded_block_size: int,
        *,
        prefix_cache: bool = True,
    ) -> None:
        """Create scheduler and pool with the settings of this run. Raises ValueError if these are inconsistent."""
        self._arriving = deque(_submissions(requests))
        with_tokens = [samples[0].request for samples in self._arriving]
        self._left_out = len({one.request for one in requests}.difference(with_tokens))
        self._unended = Counter(with_tokens)  # submissions of each request
        self._refused = 0
        self._prefix_cache = prefix_cache
        self._tokens = SyntheticTokens(recorded_block_size)
        self._runner = ReplayRunner()
        self._live: dict[str, _Samples] = {}
        self._now = 0
        self._completions: list[int] = []
        self._waste: list[float] = []
        self._output_tokens = 0
        capacity = Capacity(_ANY, _ANY, settings.block_size, settings.device_blocks, settings.host_blocks)
        limits = Limits(
            settings.token_budget,
            settings.max_sequences,
            _ANY,
            Preemption(settings.preemption),
            settings.admission_watermark,
        )
        self._scheduler = Scheduler(capacity, limits, ahead=settings.ahead)
        tiers = (settings.device_blocks, settings.host_blocks)
        spec = kvmanager.PoolSpec("replay", 1, "none", settings.block_size, *tiers)
        self._blocks = _CoreBlocks(spec, prefix_cache=prefix_cache)
        self._engine = Engine(self._scheduler, self._runner, self._blocks, lambda: float(self._now))

    def run(self, ended: Callable[[int], None]) -> Figures:
        """Run all requests to their ends; `ended` receives the number of ended ones. Raises SchedulerStalled."""
        while self._arriving or not self._scheduler.empty:
            if self._scheduler.empty:
                self._await_arrival()
            self._submit_arrived()
            if not self._turn() and not self._scheduler.empty:
                if not self._arriving:
                    raise SchedulerStalled(f"{len(self._live)} requests are live, but the scheduler makes no progress")
                self._await_arrival()
            ended(len(self._completions) + self._refused)
        return self._figures()

    def _await_arrival(self) -> None:
        self._now = max(self._now, self._arriving[0][0].arrival_step)

    def _submit_arrived(self) -> None:
        while self._arriving and self._arriving[0][0].arrival_step <= self._now:
            self._submit(self._arriving.popleft())

    def _submit(self, samples: "_Samples") -> None:
        recorded = samples[0]
        tokens = [SampleTokens(self._tokens.of(one), one.output_tokens < one.max_tokens) for one in samples]
        name = str(recorded.number)
        request = Request(
            request_id=name,
            prompt=tuple(tokens[0].tokens[: recorded.prompt_tokens]),
            samples=((),) * len(samples),
            sampling=Sampling(temperature=float(recorded.decoding != "greedy"), seed=recorded.number),
            stopping=Stopping(recorded.max_tokens, frozenset((STOP_TOKEN,))),
            salt=b"" if self._prefix_cache else name.encode(),
            priority=recorded.priority,
            arrival=float(recorded.number),
        )
        try:
            self._scheduler.requests.submit(request)
        except RequestRefused:
            self._refused += self._is_last(recorded)
            return
        self._runner.add(recorded.number, tokens)
        self._live[name] = samples

    def _turn(self) -> bool:
        """Run one turn of the engine; return True if it made progress."""
        turn = self._engine.turn()
        if self._engine.last_failure is not None:
            raise self._engine.last_failure
        if turn.step is not None:
            self._now += 1
            self._measure()
        for output in turn.outputs:
            if isinstance(output, Finished):
                self._end(self._live.pop(output.request_id)[0], output)
        return turn.progressed

    def _end(self, recorded: RecordedRequest, finished: Finished) -> None:
        self._runner.remove(recorded.number)
        self._output_tokens += finished.group.generated
        if self._is_last(recorded):
            self._completions.append(self._now - recorded.arrival_step)

    def _is_last(self, recorded: RecordedRequest) -> bool:
        """Return True for the last submission of a request that ends."""
        self._unended[recorded.request] -= 1
        return not self._unended[recorded.request]

    def _measure(self) -> None:
        pool = self._blocks.session.pool
        if slots := pool.device.counts.held * pool.spec.block_size:
            self._waste.append(1 - pool.computed_tokens() / slots)

    def _figures(self) -> Figures:
        totals = self._scheduler.totals
        completions = self._completions or [0]
        hundredths = quantiles(completions * (2 if len(completions) == 1 else 1), n=100, method="inclusive")
        return Figures(
            requests=len(self._completions),
            refused=self._refused,
            left_out=self._left_out,
            prompt_tokens=totals.prompt_tokens,
            hit_tokens=totals.cached_tokens,
            hit_rate=totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0,
            output_tokens=self._output_tokens,
            preemptions=totals.preemptions,
            recomputed_tokens=totals.recomputed_tokens,
            swapped_tokens=totals.swapped_tokens,
            peak_held_blocks=self._blocks.session.totals.peak_held_blocks,
            waste=fmean(self._waste) if self._waste else 0.0,
            completion_steps_mean=fmean(completions),
            completion_steps_p50=hundredths[49],
            completion_steps_p99=hundredths[98],
            steps=totals.steps,
        )
