"""An exception raised for one request ends that request only: other requests get the same tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import BlockManagerBroken, CopyFailed, PinFailed
from engine.run import continuations, logit_rules, logprobs, runner, sampling
from engine.run.runner import outcomes
from engine.schedule import beams, sequence_group, step_work
from engine.schedule.request import BeamSearch, Failure, FinishReason, LogitRules, Sampling
from engine.schedule.step_plan import PENDING, PromptPart, RowRules, Sampled, StepPlan, Work
from tests.engine_in_process import GREEDY, MadeToFail, ModelEngine

BLOCK = 4
GUILTY = 379  # a token that only the guilty request's fields have
GUILTY_SEED = 666
GUILTY_LOGPROBS = 13
GUILTY_WIDTH = 5
PROMPT = [5, 9, 40, 41, 42, 77, 301]

Tiny = Callable[[str], Path]
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


Patch = Callable[[pytest.MonkeyPatch, Fuse], Fields]


def before(patch: pytest.MonkeyPatch, place: Any, name: str, look: Callable[..., None]) -> None:
    """Run a check on a function's arguments before each call."""
    original = getattr(place, name)

    def looking(*arguments: Any, **named: Any) -> Any:
        look(*arguments)
        return original(*arguments, **named)

    patch.setattr(place, name, looking)


def bias_rule(patch: pytest.MonkeyPatch, fuse: Fuse) -> Fields:
    def raising(logits: torch.Tensor, rules: list[RowRules]) -> torch.Tensor:
        fuse(any(token == GUILTY for one in rules for token, _ in one.rules.logit_bias))
        return logits

    rule = (lambda one: bool(one.rules.logit_bias), raising)
    patch.setattr(logit_rules, "_RULES", (rule, *logit_rules._RULES))
    return {"logit_rules": LogitRules(logit_bias=((GUILTY, 0.5),))}


def drawing(patch: pytest.MonkeyPatch, fuse: Fuse) -> Fields:
    before(patch, sampling, "_row_state", lambda draw: fuse(draw.sampling.seed == GUILTY_SEED))
    return {"sampling": Sampling(temperature=0.7, seed=GUILTY_SEED)}


def drawing_samples(patch: pytest.MonkeyPatch, fuse: Fuse) -> Fields:
    return drawing(patch, fuse) | {"samples": 3}


def scoring_tokens(patch: pytest.MonkeyPatch, fuse: Fuse) -> Fields:
    before(patch, logprobs, "_score_chunk", lambda _, __, counts: fuse(GUILTY_LOGPROBS in counts))
    return {"logprobs": GUILTY_LOGPROBS}


def scoring_the_prompt(patch: pytest.MonkeyPatch, fuse: Fuse) -> Fields:
    before(patch, logprobs, "_score_chunk", lambda _, __, counts: fuse(GUILTY_LOGPROBS in counts))
    return {"prompt_logprobs": GUILTY_LOGPROBS}


def finding_candidates(patch: pytest.MonkeyPatch, fuse: Fuse) -> Fields:
    before(patch, continuations, "_likeliest", lambda _, count: fuse(count == 2 * GUILTY_WIDTH))
    return {"beam_search": BeamSearch(GUILTY_WIDTH)}


def scoring_beams(patch: pytest.MonkeyPatch, fuse: Fuse) -> Fields:
    before(patch, beams.Beams, "_cannot_improve", lambda search, _: fuse(search.width == GUILTY_WIDTH))
    return {"beam_search": BeamSearch(GUILTY_WIDTH)}


def answering_beams(patch: pytest.MonkeyPatch, fuse: Fuse) -> Fields:
    before(
        patch, sequence_group.Group, "answer", lambda one, *_: fuse(one.beams.width == GUILTY_WIDTH and one.beams.done)
    )
    return {"beam_search": BeamSearch(GUILTY_WIDTH)}


def branching(patch: pytest.MonkeyPatch, fuse: Fuse) -> Fields:
    before(patch, sequence_group.Sequence, "fork", lambda one, *_: fuse(one.group.width == GUILTY_WIDTH))
    return {"beam_search": BeamSearch(GUILTY_WIDTH)}


def laying_out(patch: pytest.MonkeyPatch, fuse: Fuse) -> Fields:
    before(patch, sequence_group.Sequence, "rules_at", lambda one, _: fuse(one.request.sampling.seed == GUILTY_SEED))
    return {"sampling": Sampling(temperature=0.7, seed=GUILTY_SEED), "samples": 2}


def stopping(patch: pytest.MonkeyPatch, fuse: Fuse) -> Fields:
    before(patch, sequence_group.Sequence, "append", lambda one, _: fuse(one.request.sampling.seed == GUILTY_SEED))
    return {"sampling": Sampling(temperature=0.7, seed=GUILTY_SEED), "samples": 2}


def language(verb: str, **fields: Any) -> Patch:
    return lambda _, fuse: {"constraint": Anything(fuse, verb), **fields}


FAULTS: dict[str, Patch] = {
    "a rule": bias_rule,
    "its random numbers": drawing,
    "those of one of several samples": drawing_samples,
    "log-probabilities": scoring_tokens,
    "log-probabilities of the prompt": scoring_the_prompt,
    "what its beams can go on with": finding_candidates,
    "the scores of its beams": scoring_beams,
    "the answers of its search": answering_beams,
    "beams that branch": branching,
    "laying out its work": laying_out,
    "the end of a sample": stopping,
    "what its language allows": language("allowed"),
    "a step in its language": language("advance"),
    "whether its language is complete": language("complete", samples=2),
    "the language of a beam": language("copy", beam_search=BeamSearch(GUILTY_WIDTH)),
}


def neighbours(engine: ModelEngine) -> list[str]:
    """Submit requests of every kind."""
    return [
        engine.submit(PROMPT, 14, request_id="greedy"),
        engine.submit(PROMPT[:3], 14, sampling=Sampling(seed=3, top_p=0.9), samples=2, request_id="sampled"),
        engine.submit(PROMPT[2:], 12, beam_search=BeamSearch(3), samples=3, request_id="beams"),
        engine.submit(PROMPT[1:], 12, logit_rules=LogitRules(1.3, 0.2, logit_bias=((7, 2.0),)), request_id="rules"),
        engine.submit(PROMPT[::-1], 12, logprobs=4, prompt_logprobs=2, request_id="logprobs"),
    ]


def answers(engine: ModelEngine, names: Sequence[str]) -> list[Any]:
    return [(engine.samples[name], [member.finish for member in engine.finished[name].samples]) for name in names]


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Tiny) -> list[Any]:
    engine = ModelEngine(tiny_model("llama"), block_size=BLOCK)
    names = neighbours(engine)
    engine.run()
    return answers(engine, names)


@pytest.mark.parametrize(("after", "ahead"), [(0, False), (5, True)], ids=["at once", "later, a step ahead"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_request_that_raises_fails_alone_with_its_exception(
    tiny_model: Tiny, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch, fault: str, after: int, ahead: bool
) -> None:
    engine, fuse = ModelEngine(tiny_model("llama"), block_size=BLOCK, ahead=ahead), Fuse(after)
    fields = FAULTS[fault](monkeypatch, fuse)
    if fault in ("the answers of its search", "log-probabilities of the prompt"):  # once in a request's life
        fuse.left = 0
    if fault == "what its language allows":
        fuse.left += 1  # at its submission it is a refusal
    names = neighbours(engine)
    guilty = engine.submit([8, 8, 8, 9], 20, request_id="guilty", **({"sampling": GREEDY} | fields))
    engine.run()  # which checks that all blocks came back
    failed = engine.finished[guilty]
    assert fuse.blown > 0
    assert failed.failure is Failure.REQUEST
    assert isinstance(failed.fault, Oops)
    assert "Oops: a bug" in failed.detail
    assert {one.finish for one in failed.samples} == {FinishReason.FAILED}
    assert not any(one.fault for one in (*engine.scored[guilty], *engine.sampled[guilty])), "nothing of it is told"
    assert answers(engine, names) == undisturbed
    assert engine.scheduler.totals.failures[Failure.REQUEST] == 1


@pytest.mark.parametrize("fault", ["a rule", "what its beams can go on with", "those of one of several samples"])
def test_a_request_that_raises_while_preempted_releases_everything(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    engine, fuse = ModelEngine(tiny_model("llama"), block_size=BLOCK, device_blocks=28, max_sequences=6), Fuse(6)
    fields = FAULTS[fault](monkeypatch, fuse)
    guilty = engine.submit([8, 8, 8, 9], 20, request_id="guilty", priority=1, **({"sampling": GREEDY} | fields))
    for _ in range(4):
        engine.turn()
    urgent = engine.submit(PROMPT, 100)
    engine.run()
    assert engine.finished[guilty].failure is Failure.REQUEST
    assert len(engine.tokens[urgent]) == 100


def test_the_step_behind_a_failed_one_has_the_tokens_of_the_other_requests(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is launched before the failure of the previous step is known."""
    expected = ModelEngine(tiny_model("llama"), block_size=BLOCK).generate([PROMPT, PROMPT[1:]], 14)
    engine, plans = ModelEngine(tiny_model("llama"), block_size=BLOCK, ahead=True), list[StepPlan]()
    fuse = Fuse(4)
    fields = bias_rule(monkeypatch, fuse)
    before(monkeypatch, runner.ModelRunner, "launch", lambda _, plan: plans.append(plan))
    guilty = engine.submit(PROMPT[2:], 14, request_id="guilty", **fields)
    names = [engine.submit(prompt, 14) for prompt in (PROMPT, PROMPT[1:])]
    while guilty not in engine.finished:
        engine.turn()
    assert any(work.token_ids == (PENDING,) for work in plans[-1].work)
    engine.run()
    assert engine.finished[guilty].failure is Failure.REQUEST
    assert [engine.tokens[name] for name in names] == expected


def test_a_failure_of_the_whole_step_ends_all_of_its_requests(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ModelEngine(tiny_model("llama"), block_size=BLOCK)

    def broken(*_: object) -> torch.Tensor:
        raise MadeToFail("the device")

    names = neighbours(engine)
    for _ in range(4):
        engine.turn()
    live = [name for name in names if name not in engine.finished]
    with monkeypatch.context() as patch:
        patch.setattr(runner.ModelRunner, "forward", broken)
        engine.turn()
    engine.run()
    assert {engine.finished[name].failure for name in live} == {Failure.STEP}


@pytest.mark.parametrize("error", [CopyFailed("no"), BlockManagerBroken("no")])
def test_a_fault_of_the_block_manager_is_raised(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = ModelEngine(tiny_model("llama"), block_size=BLOCK)
    neighbours(engine)

    def broken(*_: object) -> None:
        raise error

    if isinstance(error, CopyFailed):
        monkeypatch.setattr(runner.BlockCopies, "make", broken)
    else:
        monkeypatch.setattr(sequence_group.Sequence, "append", broken)
    with pytest.raises(type(error)):
        engine.run()


class TestOutcomes:
    """Results of one batch of logits with one work that cannot be sampled."""

    LOGITS = torch.randn((96, 384), generator=torch.Generator().manual_seed(4)) * 5

    def work(self) -> list[Work]:
        """Works of every kind, of one row or of several."""
        kinds: list[Fields] = [
            {"sampling": GREEDY},
            {"sampling": Sampling(seed=4, top_k=30, min_p=0.01)},
            {"sampling": GREEDY, "logprobs": 5},
            {"sampling": GREEDY, "candidates": 8},
            {"sampling": Sampling(seed=5), "rules": RowRules(LogitRules(1.5), (3, 4), (9,), frozenset({8}))},
            {"sampling": Sampling(seed=6), "rules": RowRules(mask=b"\x0f" * 48)},
            {"sampling": Sampling(seed=7), "sample_indices": (0, 1, 2)},
            {"sampling": GREEDY, "to_score": PromptPart(1, (3, 4), 2)},
        ]
        return [Work(number, (7,), 9, (1,), True, **kinds[number % len(kinds)]) for number in range(64)]

    @pytest.fixture
    def brought(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Work]], list[Sampled]]:
        def raising(logits: torch.Tensor, rules: list[RowRules]) -> torch.Tensor:
            if any(one.rules.logit_bias for one in rules):
                raise Oops
            return logits

        monkeypatch.setattr(logit_rules, "_RULES", ((lambda one: True, raising), *logit_rules._RULES))
        return lambda work: runner._results_of(self.LOGITS, work)

    def test_of_the_others_are_bit_for_bit_those_that_all_would_have_had(
        self, brought: Callable[[list[Work]], list[Sampled]]
    ) -> None:
        work = self.work()
        expected = outcomes(self.LOGITS, work)
        for guilty in range(8):
            spoiled = list(work)
            spoiled[guilty] = work[guilty]._replace(rules=RowRules(LogitRules(logit_bias=((1, 1.0),))))
            found = brought(spoiled)
            first = sum(one.outcomes for one in work[:guilty])
            end = first + work[guilty].outcomes
            assert all(isinstance(one.fault, Oops) for one in found[first:end])
            assert found[:first] + found[end:] == expected[:first] + expected[end:]

    def test_a_failure_of_the_device_is_blamed_on_no_request(
        self, brought: Callable[[list[Work]], list[Sampled]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def gone(*_: object, **__: object) -> torch.Tensor:
            raise MadeToFail("the device")

        work = self.work()
        work[0] = work[0]._replace(rules=RowRules(LogitRules(logit_bias=((1, 1.0),))))
        monkeypatch.setattr(torch.Tensor, "argmax", gone)
        with pytest.raises((Oops, MadeToFail)):
            brought(work)


def test_no_work_of_a_request_stays_in_a_plan_that_failed_for_it(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are allocated again in the same turn, so no step may write them."""
    engine, plans, fuse = ModelEngine(tiny_model("llama"), block_size=BLOCK), list[StepPlan](), Fuse(1)
    before(monkeypatch, runner.ModelRunner, "launch", lambda _, plan: plans.append(plan))
    before(
        monkeypatch,
        sequence_group.Sequence,
        "rules_at",
        lambda one, _: fuse(one.request.sampling.seed == GUILTY_SEED),
    )
    # Samples that went on elsewhere before are laid out one by one: the first of them well.
    begun = ((31, 32, 33), (41, 42, 43))
    guilty = engine.submit(PROMPT, 20, sampling=Sampling(seed=GUILTY_SEED), samples=begun, request_id="guilty")
    engine.submit(PROMPT[1:], 6)
    sequences = {member.id for member in engine.scheduler._queue.by_request[guilty].members}
    engine.run()
    assert fuse.blown
    assert engine.tokens[guilty] == []
    assert sum(work.samples for plan in plans for work in plan.work if work.sequence in sequences) == 0


def test_a_prompt_whose_pin_raises_fails_only_the_pin(tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, fuse = ModelEngine(tiny_model("llama"), block_size=BLOCK), Fuse(0)
    before(monkeypatch, step_work, "_to_score", lambda one, _: fuse(one.request.prefill_only))
    pin = engine.scheduler.requests.pin("name", tuple(PROMPT * 2), b"", 0.0)
    name = engine.submit(PROMPT[1:], 6)
    engine.run()
    assert fuse.blown
    assert len(engine.tokens[name]) == 6
    assert isinstance(pin.failure, PinFailed)
