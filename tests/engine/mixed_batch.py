"""A batch of thirty-two requests of every kind, whose results are compared with those of transformers in float32.

Sampled tokens are compared with those of the same request alone. A new kind of decoding needs a row in
`mixed_batch` and a check in `_CHECKS`.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.schedule.request import BeamSearch, LogitRules, Request, Sampling, Stopping
from engine.schedule.step_plan import Launched, StepPlan
from tests.engine.run.test_logprobs import check as check_logprobs
from tests.engine_in_process import GREEDY, ModelEngine
from tests.reference import (
    BeamAnswers,
    beam_near_ties,
    beam_reference,
    near_ties,
    near_ties_after_penalties,
)

COUNT = 32
SEQUENCES = 56  # of all its requests together
# A neighbour that comes first in every order, and whose samples take a block each every few steps.
GREEDIER = Request("neighbour", (5, 6, 7), Sampling(seed=1), Stopping(40), priority=-1, samples=((),) * 16)

Tokens = Sequence[int]


@dataclass(frozen=True)
class Tally:
    """Counters of a batch besides equal answers: near ties, and preemptions by kind."""

    near_ties: int
    beam_near_ties: int
    preemptions: dict[str, int]
    generated_tokens: int


class MixedEngine(ModelEngine):
    """Counts prefill chunks other than the last, and the most requests that ran at once."""

    def __init__(self, folder: Path, **sizes: Any) -> None:
        super().__init__(folder, block_size=4, **{"max_sequences": SEQUENCES + len(GREEDIER.samples), **sizes})
        self.chunks, self.most_running = 0, 0
        runner = self.engine._runner
        self.engine._runner = self
        self._launch = runner.launch

    def launch(self, plan: StepPlan) -> Launched:
        self.chunks += sum(not work.samples for work in plan.work)
        self.most_running = max(self.most_running, self.scheduler.running)
        return self._launch(plan)


def mixed_batch(prompts: Sequence[Tokens], max_tokens: int, stop: Iterable[int] = ()) -> list[Request]:
    """Make a request of each of 32 prompts, whose id starts with its kind. The last third mixes all kinds."""
    assert len(prompts) == COUNT

    def request(number: int, kind: str, **rest: Any) -> Request:
        stopping = Stopping(max_tokens, frozenset(stop))
        plain = Request(f"{kind} {number}", tuple(prompts[number]), GREEDY, stopping, arrival=0.0)
        return replace(plain, **rest)

    rows: list[tuple[str, dict[str, Any]]] = [
        ("greedy", {}),
        ("samples", {"sampling": Sampling(1.2, top_p=0.9, seed=3), "samples": ((),) * 4}),
        ("prompt logprobs", {"prompt_logprobs": 20}),
        ("sampled", {"sampling": Sampling(1.5, min_p=0.02, seed=3)}),
        ("logprobs", {"logprobs": 20}),
        ("greedy", {}),
    ]
    for turn in range(2):
        rows += [
            ("greedy", {}),
            *(("beams", {"beam_search": BeamSearch(width), "samples": ((),) * width}) for width in (2, 4, 6)),
            ("penalties", {"logit_rules": LogitRules(repetition_penalty=1.3 + turn / 2)}),
            ("greedy", {}),
            ("penalties", {"logit_rules": LogitRules(presence_penalty=1.5 - turn)}),
            ("sampled", {"sampling": Sampling(0.8, seed=turn)}),
            ("prompt logprobs", {"prompt_logprobs": 4 * turn}),
            ("samples", {"sampling": Sampling(1.0, top_k=50, seed=turn), "samples": ((),) * (2 + turn)}),
            ("greedy", {}),
            ("penalties", {"logit_rules": LogitRules(frequency_penalty=0.7 + turn)}),
            ("logprobs", {"logprobs": 5 * turn}),
        ]
    requests = [request(number, kind, **rest) for number, (kind, rest) in enumerate(rows)]
    assert sum(one.sequences for one in requests) == SEQUENCES
    return requests


def run(engine: ModelEngine, requests: Iterable[Request]) -> None:
    """Run them all at once."""
    for one in requests:
        engine.take(one)
    engine.run()


def check(engine: ModelEngine, requests: Iterable[Request]) -> Tally:
    """Check every answer; return the counters."""
    ties: Counter[str] = Counter()
    preemptions: Counter[str] = Counter()
    generated = 0
    for one in requests:
        kind = kind_of(one)
        ties["beams" if one.beam_search else "tokens"] += _CHECKS[kind](engine, one)
        preemptions[kind] += engine.finished[one.request_id].stats.preemptions
        generated += engine.finished[one.request_id].generated
    return Tally(ties["tokens"], ties["beams"], dict(preemptions), generated)


def kind_of(request: Request) -> str:
    return request.request_id.rpartition(" ")[0]


# Checks of one request each; they return how many near ties they found.


def _check_greedy(engine: ModelEngine, request: Request) -> int:
    stopping, tokens = request.stopping, engine.tokens[request.request_id]
    return near_ties(engine.folder, [request.prompt], [tokens], stopping.max_tokens, stopping.token_ids)


def _check_penalties(engine: ModelEngine, request: Request) -> int:
    tokens, ends = engine.tokens[request.request_id], request.stopping.token_ids
    assert len(tokens) == request.stopping.max_tokens or tokens[-1] in ends
    assert not ends.intersection(tokens[:-1])
    return near_ties_after_penalties(engine.folder, request.prompt, tokens, request.logit_rules)


def _check_beams(engine: ModelEngine, request: Request) -> int:
    found = engine.finished[request.request_id].answers
    scores = [one.score for one in found if one.score is not None]
    answers = BeamAnswers(engine.samples[request.request_id], scores)
    assert request.beam_search
    return beam_near_ties(engine.folder, request.prompt, request.beam_search, answers, _beams(engine.folder, request))


def _check_drawn(engine: ModelEngine, request: Request) -> int:
    assert engine.samples[request.request_id] == _alone(engine.folder, request)
    return 0


def _check_logprobs(engine: ModelEngine, request: Request) -> int:
    assert request.logprobs is not None
    tokens = [*request.prompt, *engine.tokens[request.request_id]]
    check_logprobs(engine.folder, tokens, engine.sampled[request.request_id], len(request.prompt), request.logprobs)
    return _check_greedy(engine, request)


def _check_prompt_logprobs(engine: ModelEngine, request: Request) -> int:
    assert request.prompt_logprobs is not None
    check_logprobs(engine.folder, request.prompt, engine.scored[request.request_id], 1, request.prompt_logprobs)
    return _check_greedy(engine, request)


_CHECKS: dict[str, Callable[[ModelEngine, Request], int]] = {
    "greedy": _check_greedy,
    "beams": _check_beams,
    "penalties": _check_penalties,
    "sampled": _check_drawn,
    "samples": _check_drawn,
    "logprobs": _check_logprobs,
    "prompt logprobs": _check_prompt_logprobs,
}
KINDS = frozenset(_CHECKS)


@functools.cache
def _beams(folder: Path, request: Request) -> BeamAnswers:
    assert request.beam_search
    stopping, ends = request.stopping, sorted(request.stopping.token_ids)
    rest = {"eos_token_id": ends} if ends else {}
    count = len(request.samples)
    return beam_reference(folder, request.prompt, request.beam_search, stopping.max_tokens, count, **rest)


@functools.cache
def _alone(folder: Path, request: Request) -> list[list[int]]:
    engine = ModelEngine(folder, block_size=4)
    run(engine, [request])
    return engine.samples[request.request_id]
