"""Requests that generate nothing: they end when their prompt is computed, and scored if asked."""

from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.schedule.limits import Preemption
from engine.schedule.request import BeamSearch, FinishReason, Sampling
from engine.schedule.step_plan import StepPlan
from tests.engine_in_process import ModelEngine

BLOCK = 4
SAMPLED = Sampling(seed=3)


def tokens_of(length: int) -> list[int]:
    return [40 + 7 * number % 300 for number in range(length)]


def observed(engine: ModelEngine) -> list[StepPlan]:
    """Return the list to which the plans of the steps are added as they are published."""
    plans: list[StepPlan] = []
    publish = engine.scheduler.publish

    def noted(plan: StepPlan, *rest: Any) -> None:
        plans.append(plan)
        publish(plan, *rest)

    engine.scheduler.publish = noted  # type: ignore[method-assign]
    return plans


@pytest.mark.parametrize("length", [1, 2, 8, 9, 13])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_prompt_alone_is_computed_up_to_its_last_token_and_nothing_is_sampled(
    folder: Path, length: int, samples: int
) -> None:
    engine = ModelEngine(folder, block_size=BLOCK, token_budget=4, max_sequences=1)
    plans = observed(engine)
    name = engine.submit(tokens_of(length), 0, samples=samples, prompt_logprobs=0)
    engine.run()
    assert [member.finish for member in engine.finished[name].samples] == [FinishReason.LENGTH] * samples
    assert engine.samples[name] == [[]] * samples
    assert len(engine.scored[name]) == length - 1
    computed = max(1, length - 1)
    assert sum(len(work.token_ids) for plan in plans for work in plan.work) == computed
    assert len(plans) == -(-computed // 4), "no step follows the last token"
    assert not any(work.samples for plan in plans for work in plan.work)
    assert engine.scheduler.totals.generated_tokens == 0


def test_it_needs_no_block_for_a_token_behind_it(folder: Path) -> None:
    engine = ModelEngine(folder, block_size=BLOCK, device_blocks=3)
    fitting = engine.submit(tokens_of(13), 0, samples=4, prompt_logprobs=0)
    engine.run()
    assert len(engine.scored[fitting]) == 12
    with pytest.raises(InvalidRequest, match="take 4 blocks; the pool has 3") as refused:
        engine.submit(tokens_of(14), 0)
    assert refused.value.field == "prompt"


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
@pytest.mark.parametrize("mode", [{"ahead": True}, {"proposed_tokens": 3}, {}], ids=["ahead", "proposals", "plain"])
def test_it_is_scored_once_beside_others_that_preempt_it(
    folder: Path, preemption: Preemption, mode: dict[str, Any]
) -> None:
    prompt, pool = tokens_of(37), {"block_size": BLOCK, "device_blocks": 12, "host_blocks": 24}
    alone = ModelEngine(folder, block_size=BLOCK)
    expected = alone.submit(prompt, 0, prompt_logprobs=2)
    alone.run()
    engine = ModelEngine(folder, token_budget=4, max_sequences=4, preemption=preemption, **pool, **mode)
    urgent = engine.submit(prompt[:2], 30)
    victim = engine.submit(prompt, 0, priority=1, prompt_logprobs=2)
    while not engine.scheduler.totals.preemptions:
        engine.turn()
    engine.run()
    assert [one.token_id for one in engine.scored[victim]] == prompt[1:]
    scores = [one.logprob for one in engine.scored[victim]]
    assert scores == pytest.approx([one.logprob for one in alone.scored[expected]], abs=1e-4)
    assert len(engine.tokens[urgent]) == 30
    assert engine.finished[victim].finish is FinishReason.LENGTH


def test_without_scores_it_fills_the_prefix_cache_and_hits_it(folder: Path) -> None:
    engine = ModelEngine(folder, block_size=BLOCK)
    names = []
    for _ in range(2):
        names.append(engine.submit(tokens_of(18), 0))
        engine.run()
    follower = engine.submit(tokens_of(18), 2)
    engine.run()
    assert [engine.cached[name] for name in (*names, follower)] == [0, 16, 16]


def test_a_cancelled_one_releases_its_blocks(folder: Path) -> None:
    engine = ModelEngine(folder, block_size=BLOCK, token_budget=4, max_sequences=2)
    name = engine.submit(tokens_of(37), 0, prompt_logprobs=0)
    engine.turn_until(lambda: engine.scored[name])
    engine.scheduler.requests.cancel(name)
    engine.run()
    assert engine.finished[name].finish is FinishReason.CANCELLED
    assert len(engine.scored[name]) < 36


@pytest.mark.parametrize(
    ("fields", "most", "field", "text"),
    [
        ({"beam_search": BeamSearch(2)}, 0, "stopping.max_tokens", "must be at least 1 with beam_search, not 0"),
        ({"samples": ((5,),)}, 0, "samples.generated_token_ids", "fewer than stopping.max_tokens .0. tokens, not 1"),
    ],
)
def test_what_needs_a_token_is_refused(folder: Path, fields: dict[str, Any], most: int, field: str, text: str) -> None:
    engine = ModelEngine(folder, block_size=BLOCK)
    with pytest.raises(InvalidRequest, match=text) as refused:
        engine.submit(tokens_of(5), most, **fields)
    assert refused.value.field == field
    assert engine.scheduler.empty
