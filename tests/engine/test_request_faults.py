"""An exception raised for one request ends that request only: other requests get the same tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import BlockManagerBroken, CopyFailed, PinFailed
from engine.run import continuations, forward, logit_rules, logprobs, runner, sampling
from engine.run.runner import outcomes
from engine.schedule import beams, sequence_group
from engine.schedule.planning import step_work
from engine.schedule.request import BeamSearch, Failure, FinishReason, LogitRules, Sampling
from engine.schedule.step_plan import PENDING, PromptPart, RowRules, Sampled, StepPlan, Work
from simulation.runner import MadeToFail
from tests.engine_in_process import GREEDY, ModelEngine

BLOCK = 4
GUILTY = 379  # a token that only the guilty request's fields have
GUILTY_SEED = 666
GUILTY_LOGPROBS = 13
GUILTY_WIDTH = 5
PROMPT = [5, 9, 40, 41, 42, 77, 301]

Make = Callable[..., ModelEngine]
Fields = dict[str, Any]


class Oops(Exception):
    """The exception that tests raise in the engine's code."""


class Fuse:
    """Raises from call number `after` on, if the call is for the guilty request."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.blown = 0

    def __call__(self, guilty: object) -> None:
        if guilty:
            self.left -= 1
            if self.left < 0:
                self.blown += 1
                raise Oops("a bug, with half a character: \ud800")


class Anything:
    """A constraint that allows everything; one method of its states is on the fuse."""

    def __init__(self, fuse: Fuse, verb: str) -> None:
        self.fuse = fuse
        self.verb = verb

    @property
    def complete(self) -> bool:
        self.fuse(self.verb == "complete")
        return False

    def start(self) -> "Anything":
        return Anything(self.fuse, self.verb)

    def allowed(self) -> bytes:
        self.fuse(self.verb == "allowed")
        return b"\xff" * 48

    def advance(self, token_id: int) -> None:
        del token_id
        self.fuse(self.verb == "advance")

    def copy(self) -> "Anything":
        self.fuse(self.verb == "copy")
        return Anything(self.fuse, self.verb)


Install = Callable[[pytest.MonkeyPatch, Fuse], Fields]


def before(patch: pytest.MonkeyPatch, owner: Any, name: str, check: Callable[..., object]) -> None:
    """Run a check on a function's arguments before each call."""
    original = getattr(owner, name)

    def checked(*arguments: Any, **named: Any) -> Any:
        check(*arguments)
        return original(*arguments, **named)

    patch.setattr(owner, name, checked)


def call_of(owner: Any, name: str, is_guilty: Callable[..., object], **fields: Any) -> Install:
    """Let a function raise for the guilty request, which has these fields."""

    def install(patch: pytest.MonkeyPatch, fuse: Fuse) -> Fields:
        before(patch, owner, name, lambda *arguments: fuse(is_guilty(*arguments)))
        return fields

    return install


def constraint_method(verb: str, **fields: Any) -> Install:
    return lambda _, fuse: {"constraint": Anything(fuse, verb), **fields}


def bias_rule(patch: pytest.MonkeyPatch, fuse: Fuse) -> Fields:
    def raising(logits: torch.Tensor, rules: list[RowRules]) -> torch.Tensor:
        fuse(any(token == GUILTY for one in rules for token, _ in one.rules.logit_bias))
        return logits

    rule = (lambda one: bool(one.rules.logit_bias), raising)
    patch.setattr(logit_rules, "_RULES", (rule, *logit_rules._RULES))
    return {"logit_rules": LogitRules(logit_bias=((GUILTY, 0.5),))}


def has_guilty_seed(one: Any, *_: object) -> bool:
    return one.sampling.seed == GUILTY_SEED


def draws_guilty_seed(draws: list[sampling.Draw]) -> bool:
    return any(map(has_guilty_seed, draws))


def is_guilty_sequence(one: sequence_group.Sequence, *_: object) -> bool:
    return has_guilty_seed(one.request)


def is_guilty_score(count: int, *_: object) -> bool:
    return count == GUILTY_LOGPROBS


SEEDED = {"sampling": Sampling(temperature=0.7, seed=GUILTY_SEED)}
SEARCH = {"beam_search": BeamSearch(GUILTY_WIDTH)}
FAULTS: dict[str, Install] = {
    "logit rule": bias_rule,
    "random numbers": call_of(sampling, "row_states", draws_guilty_seed, **SEEDED),
    "random numbers of a sample": call_of(sampling, "row_states", draws_guilty_seed, samples=3, **SEEDED),
    "log-probabilities": call_of(logprobs, "_first", is_guilty_score, logprobs=GUILTY_LOGPROBS),
    "prompt's log-probabilities": call_of(logprobs, "_first", is_guilty_score, prompt_logprobs=GUILTY_LOGPROBS),
    "candidates": call_of(continuations, "_likeliest", lambda _, count: count == 2 * GUILTY_WIDTH, **SEARCH),
    "beam scores": call_of(beams.Beams, "_cannot_improve", lambda one, _: one.width == GUILTY_WIDTH, **SEARCH),
    "answers of a search": call_of(
        sequence_group.Group, "answer", lambda one, *_: one.beams.width == GUILTY_WIDTH and one.beams.done, **SEARCH
    ),
    "fork of a beam": call_of(
        sequence_group.Sequence, "fork", lambda one, *_: one.group.width == GUILTY_WIDTH, **SEARCH
    ),
    "layout of the work": call_of(sequence_group.Sequence, "rules_at", is_guilty_sequence, samples=2, **SEEDED),
    "end of a sample": call_of(sequence_group.Sequence, "append", is_guilty_sequence, samples=2, **SEEDED),
    "tokens allowed by the constraint": constraint_method("allowed"),
    "step of the constraint": constraint_method("advance"),
    "end of the constraint": constraint_method("complete", samples=2),
    "constraint of a beam": constraint_method("copy", **SEARCH),
}
ONCE_IN_A_REQUEST = ("answers of a search", "prompt's log-probabilities")


def neighbours(engine: ModelEngine) -> list[str]:
    """Submit requests of every kind."""
    return [
        engine.submit(PROMPT, 14, request_id="greedy"),
        engine.submit(PROMPT[:3], 14, sampling=Sampling(seed=3, top_p=0.9), samples=2, request_id="sampled"),
        engine.submit(PROMPT[2:], 12, beam_search=BeamSearch(3), samples=3, request_id="beams"),
        engine.submit(PROMPT[1:], 12, logit_rules=LogitRules(1.3, 0.2, logit_bias=((7, 2.0),)), request_id="rules"),
        engine.submit(PROMPT[::-1], 12, logprobs=4, prompt_logprobs=2, request_id="logprobs"),
    ]


def submit_guilty(engine: ModelEngine, fields: Fields, **more: Any) -> str:
    return engine.submit([8, 8, 8, 9], 20, request_id="guilty", **({"sampling": GREEDY} | fields | more))


def answers(engine: ModelEngine, names: Sequence[str]) -> list[Any]:
    return [(engine.samples[name], [member.finish for member in engine.finished[name].samples]) for name in names]


@pytest.fixture(scope="module")
def make(tiny_model: Callable[[str], Path]) -> Make:
    return partial(ModelEngine, tiny_model("llama"), block_size=BLOCK)


@pytest.fixture(scope="module")
def undisturbed(make: Make) -> list[Any]:
    engine = make()
    names = neighbours(engine)
    engine.run()
    return answers(engine, names)


@pytest.mark.parametrize(("after", "ahead"), [(0, False), (5, True)], ids=["at once", "later, a step ahead"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_raises_fails_alone_with_its_exception(
    make: Make, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch, fault: str, after: int, ahead: bool
) -> None:
    engine, fuse = make(ahead=ahead), Fuse(after)
    fields = FAULTS[fault](monkeypatch, fuse)
    if fault in ONCE_IN_A_REQUEST:
        fuse.left = 0
    if fault == "tokens allowed by the constraint":
        fuse.left += 1  # the first call is at the submission, where an exception is a refusal
    names = neighbours(engine)
    guilty = submit_guilty(engine, fields)
    engine.run()
    failed = engine.finished[guilty]
    assert fuse.blown > 0
    assert failed.failure is Failure.REQUEST
    assert isinstance(failed.fault, Oops)
    assert "Oops: a bug" in failed.detail
    assert {one.finish for one in failed.samples} == {FinishReason.FAILED}
    assert not any(one.fault for one in (*engine.scored[guilty], *engine.sampled[guilty])), "no failed token is sent"
    assert answers(engine, names) == undisturbed
    assert engine.scheduler.totals.failures[Failure.REQUEST] == 1


@pytest.mark.parametrize("fault", ["logit rule", "candidates", "random numbers of a sample"])
def test_a_request_that_raises_while_preempted_releases_everything(
    make: Make, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine, fuse = make(device_blocks=28, max_sequences=6), Fuse(6)
    fields = FAULTS[fault](monkeypatch, fuse)
    guilty = submit_guilty(engine, fields, priority=1)
    engine.turn_times(4)
    urgent = engine.submit(PROMPT, 100)
    engine.run()
    assert engine.finished[guilty].failure is Failure.REQUEST
    assert len(engine.tokens[urgent]) == 100


def test_the_step_behind_a_failed_one_has_the_tokens_of_the_other_requests(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind is launched before the failure of the previous one is known."""
    expected = make().generate([PROMPT, PROMPT[1:]], 14)
    engine, plans = make(ahead=True), list[StepPlan]()
    fuse = Fuse(4)
    fields = bias_rule(monkeypatch, fuse)
    before(monkeypatch, runner.ModelRunner, "launch", lambda _, plan: plans.append(plan))
    guilty = engine.submit(PROMPT[2:], 14, request_id="guilty", **fields)
    names = [engine.submit(prompt, 14) for prompt in (PROMPT, PROMPT[1:])]
    engine.turn_until(lambda: guilty in engine.finished)
    assert any(work.token_ids == (PENDING,) for work in plans[-1].work)
    engine.run()
    assert engine.finished[guilty].failure is Failure.REQUEST
    assert [engine.tokens[name] for name in names] == expected


def test_a_failure_of_the_whole_step_ends_all_of_its_requests(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()

    def broken(*_: object) -> torch.Tensor:
        raise MadeToFail("the device")

    names = neighbours(engine)
    engine.turn_times(4)
    live = [name for name in names if name not in engine.finished]
    with monkeypatch.context() as patch:
        patch.setattr(forward.ForwardPass, "logits", broken)
        engine.turn()
    engine.run()
    assert {engine.finished[name].failure for name in live} == {Failure.STEP}


@pytest.mark.parametrize("error", [CopyFailed("no"), BlockManagerBroken("no")])
def test_a_fault_of_the_block_manager_is_raised(make: Make, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    engine = make()
    neighbours(engine)

    def broken(*_: object) -> None:
        raise error

    if isinstance(error, CopyFailed):
        monkeypatch.setattr(forward.BlockCopies, "make", broken)
    else:
        monkeypatch.setattr(sequence_group.Sequence, "append", broken)
    with pytest.raises(type(error)):
        engine.run()


class TestOutcomes:
    """Results of one batch of logits with one work that cannot be sampled."""

    LOGITS = torch.randn((96, 384), generator=torch.Generator().manual_seed(4)) * 5
    # Works of every kind, of one row or of several.
    KINDS: tuple[Fields, ...] = (
        {"sampling": GREEDY},
        {"sampling": Sampling(seed=4, top_k=30, min_p=0.01)},
        {"sampling": GREEDY, "logprobs": 5},
        {"sampling": GREEDY, "candidates": 8},
        {"sampling": Sampling(seed=5), "rules": RowRules(LogitRules(1.5), (3, 4), (9,), frozenset({8}))},
        {"sampling": Sampling(seed=6), "rules": RowRules(mask=b"\x0f" * 48)},
        {"sampling": Sampling(seed=7), "sample_indices": (0, 1, 2)},
        {"sampling": GREEDY, "to_score": PromptPart(1, (3, 4), 2)},
    )
    WORK = tuple(Work(number, (7,), 9, (1,), True, **kind) for number, kind in enumerate(KINDS * 8))

    def results(self, guilty: int) -> list[Sampled]:
        """Return the results if the rules of the work at an index raise."""
        work = list(self.WORK)
        work[guilty] = work[guilty]._replace(rules=RowRules(LogitRules(logit_bias=((1, 1.0),))))
        return runner._results_of(self.LOGITS, work)

    @pytest.fixture(autouse=True)
    def bias_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def raising(logits: torch.Tensor, rules: list[RowRules]) -> torch.Tensor:
            if any(one.rules.logit_bias for one in rules):
                raise Oops
            return logits

        monkeypatch.setattr(logit_rules, "_RULES", ((lambda one: True, raising), *logit_rules._RULES))

    def test_of_the_other_works_are_bit_for_bit_the_same(self) -> None:
        expected = outcomes(self.LOGITS, self.WORK)
        for guilty in range(len(self.KINDS)):
            found = self.results(guilty)
            first = sum(one.outcomes for one in self.WORK[:guilty])
            end = first + self.WORK[guilty].outcomes
            assert all(isinstance(one.fault, Oops) for one in found[first:end])
            assert found[:first] + found[end:] == expected[:first] + expected[end:]

    def test_a_failure_of_the_device_is_the_fault_of_no_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def lost(*_: object, **__: object) -> torch.Tensor:
            raise MadeToFail("the device")

        monkeypatch.setattr(torch.Tensor, "argmax", lost)
        with pytest.raises((Oops, MadeToFail)):
            self.results(0)


def test_no_work_of_a_request_stays_in_a_plan_that_failed_for_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are allocated again in the same turn, so no step may write them."""
    engine, plans, fuse = make(), list[StepPlan](), Fuse(1)
    before(monkeypatch, runner.ModelRunner, "launch", lambda _, plan: plans.append(plan))
    FAULTS["layout of the work"](monkeypatch, fuse)
    # Samples of a failover are laid out one by one; the first of them does not raise.
    begun = ((31, 32, 33), (41, 42, 43))
    guilty = engine.submit(PROMPT, 20, sampling=Sampling(seed=GUILTY_SEED), samples=begun, request_id="guilty")
    engine.submit(PROMPT[1:], 6)
    sequences = {member.id for member in engine.scheduler._queue.by_request[guilty].members}
    engine.run()
    assert fuse.blown
    assert engine.tokens[guilty] == []
    assert sum(work.samples for plan in plans for work in plan.work if work.sequence in sequences) == 0


def test_a_prompt_whose_pin_raises_fails_only_the_pin(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, fuse = make(), Fuse(0)
    before(monkeypatch, step_work, "_to_score", lambda one, _: fuse(one.request.prefill_only))
    pin = engine.scheduler.requests.pin("name", tuple(PROMPT * 2), b"", 0.0)
    name = engine.submit(PROMPT[1:], 6)
    engine.run()
    assert fuse.blown
    assert len(engine.tokens[name]) == 6
    assert isinstance(pin.failure, PinFailed)
