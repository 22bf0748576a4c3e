"""Proposed tokens change no token: random requests with and without them, preempted, failed over, stopped anywhere."""

import random
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest

from blocks import Step
from engine.bad_words import BadWords
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits, Preemption
from engine.schedule.request import BeamSearch, FinishReason, LogitRules, Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from engine.schedule.speculation.ngram_index import Draft, NgramIndex
from engine.schedule.step_plan import Done, Launched, Sampled, StepPlan
from kvmanager import AppliedStep
from tests.engine.watched_scheduler import WatchedScheduler
from tests.engine_in_process import GREEDY, EngineInProcess, ModelEngine

BLOCK = 4
PROPOSED = 5
TOLERANCE = 1e-4  # of log-probabilities
KINDS = ("greedy", "sampled", "samples", "logprobs", "rules", "continued", "penalized", "beams")


def request_of(draw: random.Random, number: int, kind: str) -> Request:
    """Make a request that repeats its prompt's tokens, because most may choose only among these."""
    part = [draw.randrange(3, 380) for _ in range(draw.randint(2, 5))]
    prompt = (part * 6)[: draw.randint(4, 24)]
    few = LogitRules(allowed_token_ids=tuple(part[: draw.randint(2, 3)]))
    sampling, rest = GREEDY, dict[str, Any](logit_rules=few)
    if kind in ("sampled", "samples"):
        sampling = Sampling(draw.choice((0.05, 0.3)), draw.choice((0, 20)), draw.choice((1.0, 0.9)), seed=number)
    most = draw.randint(20, 40)
    stopping = Stopping(most, min_tokens=draw.choice((0, 6)), token_ids=frozenset(range(50, 50 + draw.choice((0, 30)))))
    match kind:
        case "samples":
            rest |= {"samples": ((),) * draw.randint(2, 3)}
        case "logprobs":
            rest |= {"logprobs": draw.choice((0, 3)), "prompt_logprobs": draw.choice((None, 2))}
        case "rules":
            words = BadWords(((part[0],), (part[1], part[-1])))
            rest = {"logit_rules": LogitRules(logit_bias=((part[-1], 4.0),), bad_words=words)}
        case "continued":
            rest |= {"samples": (tuple(part * 2),)}
            stopping = Stopping(most + len(part * 2))
        case "penalized":
            rest = {"logit_rules": LogitRules(frequency_penalty=0.5)}
        case "beams":
            rest = {"beam_search": BeamSearch(2), "samples": ((),)}
    return Request(f"{kind} {number}", tuple(prompt), sampling, stopping, arrival=float(number), **rest)


def run(engine: EngineInProcess, requests: list[Request], draw: random.Random) -> EngineInProcess:
    for request in requests:
        engine.take(request)
        engine.turn_times(draw.choice((0, 0, 2)))
    engine.run()
    return engine


@pytest.mark.parametrize("way", Preemption)
def test_random_requests_get_the_same_tokens_with_proposals_and_preemptions(folder: Path, way: Preemption) -> None:
    draw = random.Random(way.value)
    requests = [request_of(draw, number, kind) for number, kind in enumerate(KINDS * 2)]
    plain = run(ModelEngine(folder, block_size=BLOCK, device_blocks=600), requests, draw)
    largest = max(map(plain.scheduler.capacity.max_blocks, requests))
    sizes: dict[str, Any] = {"block_size": BLOCK, "device_blocks": largest + 8, "host_blocks": 100, "max_sequences": 12}
    tight = run(ModelEngine(folder, **sizes, preemption=way, proposed_tokens=PROPOSED), requests, draw)
    totals = tight.scheduler.totals
    assert totals.preemptions > 0
    assert totals.accepted_tokens > 20
    assert totals.accepted_tokens < totals.draft_tokens, "some are refused"
    assert totals.generated_tokens == plain.scheduler.totals.generated_tokens
    for request in requests:
        name = request.request_id
        assert tight.samples[name] == plain.samples[name], name
        ends = [(one.finish, one.stop_token) for one in plain.finished[name].samples]
        assert [(one.finish, one.stop_token) for one in tight.finished[name].samples] == ends
        for found, expected in zip(tight.drawn[name], plain.drawn[name], strict=True):
            logprobs = [one.logprob for one in expected]
            assert [one.logprob for one in found] == pytest.approx(logprobs, abs=TOLERANCE)
            assert [[token for token, _ in one.top] for one in found] == [[t for t, _ in one.top] for one in expected]


class Scripted:
    """A runner whose next token is the one after the last, in a cycle, whatever the model.

    The tokens at positions `wrong_at` are 99 instead, and sampling the one at `faulty_at` fails.
    """

    def __init__(self, cycle: int = 5, wrong_at: Container[int] = (), faulty_at: int = -1) -> None:
        self.cycle, self.wrong_at, self.faulty_at = cycle, wrong_at, faulty_at
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Launched:
        self.plans.append(plan)
        results = []
        for work in plan.work:
            ends = range(work.least_end, work.end + 1) if work.samples else ()
            results += [self._sampled(work.token_ids[end - work.start - 1], end) for end in ends]
        return Done(results)

    def _sampled(self, last: int, position: int) -> Sampled:
        if position == self.faulty_at:
            return Sampled(0, fault=ValueError("this row cannot be sampled"))
        return Sampled(99 if position in self.wrong_at else (last + 1) % self.cycle)


def engine_with(
    runner: Scripted,
    limits: Limits | None = None,
    observe: Callable[[Step, AppliedStep], None] | None = None,
    blocks: int = 60,
) -> EngineInProcess:
    capacity = Capacity(200, 100, BLOCK, blocks)
    scheduler = WatchedScheduler(capacity, limits or Limits(proposed_tokens=PROPOSED))
    engine = EngineInProcess(runner, capacity, scheduler=scheduler, observe=observe)
    scheduler.pool = lambda: engine.blocks.pool
    return engine


def test_a_step_yields_all_proposed_tokens_that_are_right_and_one_more() -> None:
    runner = Scripted()
    engine = engine_with(runner)
    (tokens,) = engine.generate([range(5)], 40)
    assert tokens == [place % 5 for place in range(40)]
    totals = engine.scheduler.totals
    assert totals.accepted_tokens == totals.draft_tokens
    assert max(len(work.token_ids) for plan in runner.plans for work in plan.work) == 1 + PROPOSED
    assert totals.steps < 12
    assert totals.computed_tokens == 5 + 40 - 1, "the last token is never computed"


def test_the_first_token_that_differs_is_right_and_what_follows_it_is_not_taken() -> None:
    runner = Scripted(wrong_at=[20])
    engine = engine_with(runner)
    (tokens,) = engine.generate([range(5)], 18)
    assert tokens == [*(place % 5 for place in range(15)), 99, 0, 1]
    refused = next(plan.work[0] for plan in runner.plans if plan.work[0].start < 20 < plan.work[0].end)
    assert 20 - refused.start < len(refused.token_ids) - 1, "tokens behind it were computed too"


def test_a_stop_token_among_the_accepted_ones_ends_the_sequence_there() -> None:
    engine = engine_with(Scripted(cycle=9))
    name = engine.submit([*range(9)] * 2, 40, stop=[3])
    engine.run()
    assert engine.tokens[name] == [0, 1, 2, 3]
    sample = engine.finished[name].samples[0]
    assert (sample.finish, sample.stop_token) == (FinishReason.STOP, 3)
    assert engine.scheduler.totals.generated_tokens == 4
    assert engine.scheduler.totals.accepted_tokens == 5, "also those behind the stop token"


@pytest.mark.parametrize("most", range(1, 12))
def test_a_sequence_never_gets_more_than_its_tokens_and_computes_no_token_for_nothing(most: int) -> None:
    runner = Scripted()
    engine = engine_with(runner)
    (tokens,) = engine.generate([(0, 1, 2, 3, 4) * 2], most)
    assert tokens == [place % 5 for place in range(most)]
    assert max(plan.work[0].end for plan in runner.plans) <= 10 + most - 1


def test_a_failure_to_sample_behind_an_accepted_token_fails_the_request_when_its_turn_comes() -> None:
    engine = engine_with(Scripted(faulty_at=20))
    name = engine.submit(range(5), 40)
    with pytest.raises(ValueError, match="cannot be sampled"):
        raise engine_failure(engine, name)
    assert engine.tokens[name] == [place % 5 for place in range(15)]


def engine_failure(engine: EngineInProcess, name: str) -> Exception:
    engine.run()
    fault = engine.finished[name].fault
    assert fault is not None
    return fault


def test_each_position_has_the_rules_that_follow_from_the_proposed_tokens_before_it() -> None:
    runner = Scripted()
    engine = engine_with(runner)
    rules = LogitRules(bad_words=BadWords(((3, 77),)))
    engine.submit([*range(5)] * 2, 20, logit_rules=rules)
    engine.run()
    proposed = [work for plan in runner.plans for work in plan.work if work.proposed]
    assert proposed
    for work in proposed:
        banned = [one.banned_token_ids if one else frozenset() for one in (work.rules, *work.later_rules)]
        assert banned == [frozenset({77} if token == 3 else ()) for token in work.token_ids]


def test_only_verified_tokens_get_keys() -> None:
    keyed: list[int] = []
    engine = engine_with(
        Scripted(wrong_at=[22]), observe=lambda step, _: keyed.extend(t for one in step.commits for t in one.token_ids)
    )
    (tokens,) = engine.generate([range(5)], 30)
    known = [*range(5), *tokens]
    assert keyed == known[: len(keyed)]
    assert len(keyed) >= len(known) // BLOCK * BLOCK - BLOCK


@pytest.mark.parametrize("blocks", [13, 17, 22, 200])
@pytest.mark.parametrize("wrong_at", [range(0), range(0, 200, 3)])
def test_lookahead_for_proposals_is_bounded_and_preempts_nothing(blocks: int, wrong_at: range) -> None:
    """The scheduler's own checks would fail."""
    engine = engine_with(Scripted(wrong_at=wrong_at), Limits(proposed_tokens=9), blocks=blocks)
    prompts = [[(place + number) % 5 for place in range(6 + number)] for number in range(4)]
    engine.generate(prompts, 40)
    assert engine.scheduler.totals.draft_tokens > 0
    assert (engine.scheduler.totals.preemptions > 0) == (blocks < 50)


@pytest.mark.parametrize("budget", [2, 4, 9])
def test_proposed_tokens_count_in_the_token_budget(budget: int) -> None:
    runner = Scripted()
    engine = engine_with(runner, Limits(budget, 2, proposed_tokens=PROPOSED))
    engine.generate([(0, 1, 2, 3, 4) * 2] * 2, 30)
    fed = [sum(len(work.token_ids) for work in plan.work) for plan in runner.plans]
    assert max(fed) == budget


def test_excluded_requests_get_no_proposals_and_are_counted(folder: Path) -> None:
    engine = ModelEngine(folder, proposed_tokens=PROPOSED)
    rules = LogitRules(repetition_penalty=1.2)
    engine.submit((7, 8, 9) * 4, 20, logit_rules=rules)
    engine.submit((7, 8, 9) * 4, 20, beam_search=BeamSearch(2))
    engine.run()
    totals = engine.scheduler.totals
    assert totals.unspeculated == {"penalties": 1, "beam_search": 1}
    assert totals.draft_tokens == totals.declined_tokens == 0


def test_an_exception_while_proposing_fails_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = NgramIndex.draft

    def draft_or_fail(index: NgramIndex, tokens: list[int], most: int) -> Draft | None:
        if tokens[0] == 4 and len(tokens) > 14:
            raise ZeroDivisionError("a fault of the index")
        return draft(index, tokens, most)

    monkeypatch.setattr(NgramIndex, "draft", draft_or_fail)
    engine = engine_with(Scripted())
    faulty = engine.submit([4, *range(5)] * 2, 30)
    sound = engine.submit([*range(5)] * 2, 30)
    engine.run()
    assert isinstance(engine.finished[faulty].fault, ZeroDivisionError)
    assert engine.tokens[sound] == [place % 5 for place in range(30)]


def test_proposals_and_steps_ahead_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="proposed_tokens must be 0 where steps are planned ahead, not 3"):
        Scheduler(Capacity(64, 100, BLOCK, 8), Limits(proposed_tokens=3), ahead=True)


@pytest.mark.parametrize("tokens", [-1, 33])
def test_the_number_of_proposed_tokens_is_bounded(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"proposed_tokens must be between 0 and 32, not {tokens}"):
        Limits(proposed_tokens=tokens)
