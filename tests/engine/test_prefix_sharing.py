"""Common prefixes are computed once, without an effect on tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest

from simulation.runner import MadeToFail
from tests.engine_in_process import ModelEngine
from tests.reference import near_ties

BLOCK = 8
MAX_TOKENS = 12

Prompt = Callable[[int], list[int]]
Make = Callable[..., ModelEngine]


@pytest.fixture
def make(tiny_model: Callable[[str], Path]) -> Make:
    def engine(token_budget: int = 512, device_blocks: int = 200, family: str = "llama") -> ModelEngine:
        return ModelEngine(tiny_model(family), block_size=BLOCK, device_blocks=device_blocks, token_budget=token_budget)

    return engine


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("token_budget", [16, 512])
def test_a_second_request_computes_only_what_it_does_not_share(
    make: Make, random_prompt: Prompt, family: str, token_budget: int
) -> None:
    engine = make(token_budget, family=family)
    prefix = random_prompt(40)
    first, second = prefix + random_prompt(5), prefix + random_prompt(13)
    answers = engine.generate([first], MAX_TOKENS)
    before = engine.scheduler.totals.computed_tokens
    answers += engine.generate([second], MAX_TOKENS)
    assert engine.cached == {"r0": 0, "r1": 40}
    assert engine.scheduler.totals.computed_tokens - before == 13 + MAX_TOKENS - 1
    assert near_ties(engine.folder, [first, second], answers, MAX_TOKENS) <= 1


@pytest.mark.parametrize(("shared", "cached"), [(0, 0), (7, 0), (8, 8), (15, 8), (16, 16), (32, 24)])
def test_whole_blocks_are_shared_and_one_token_is_left_to_compute(
    make: Make, random_prompt: Prompt, shared: int, cached: int
) -> None:
    engine = make()
    first = random_prompt(32)
    second = first[:shared] + random_prompt(32 - shared)
    engine.generate([first], 1)
    engine.generate([second], 1)
    assert engine.cached["r1"] == cached


def test_generated_tokens_are_shared_too(make: Make, random_prompt: Prompt) -> None:
    engine = make()
    prompt = random_prompt(10)
    [answer] = engine.generate([prompt], 30)
    longer = [*prompt, *answer, 7]
    answers = engine.generate([longer], MAX_TOKENS)
    assert engine.cached["r1"] == 32  # of 41: 40 are prompt and answer, the last of which was never computed
    assert near_ties(engine.folder, [longer], answers, MAX_TOKENS) <= 1


def test_requests_of_another_salt_share_nothing(make: Make, random_prompt: Prompt) -> None:
    engine = make()
    prompt = random_prompt(40)
    one = engine.generate([prompt], MAX_TOKENS, salt=b"one")
    other = engine.generate([prompt], MAX_TOKENS, salt=b"other")
    assert engine.cached == {"r0": 0, "r1": 0}
    assert one == other


@pytest.mark.parametrize("token_budget", [16, 64, 512])
def test_eight_equal_prompts_that_arrive_together_compute_their_prefix_once(
    make: Make, random_prompt: Prompt, token_budget: int
) -> None:
    engine = make(token_budget)
    prompt = random_prompt(100)
    answers = engine.generate([prompt] * 8, MAX_TOKENS)
    assert sorted(engine.cached.values()) == [0] + [96] * 7
    assert engine.scheduler.totals.computed_tokens == 96 + 8 * (4 + MAX_TOKENS - 1)
    assert near_ties(engine.folder, [prompt] * 8, answers, MAX_TOKENS) <= 1


@pytest.mark.parametrize("turns", range(1, 8))
def test_equal_prompts_that_arrive_while_the_first_is_prefilled_wait_and_share(
    make: Make, random_prompt: Prompt, turns: int
) -> None:
    engine = make(token_budget=16)
    prompt = random_prompt(100)  # seven chunks
    ids = [engine.submit(prompt, MAX_TOKENS)]
    engine.turn_times(turns)
    assert engine.tokens["r0"] == []
    ids += [engine.submit(prompt, MAX_TOKENS) for _ in range(7)]
    engine.turn()
    assert (engine.scheduler.waiting, engine.scheduler.deferred) in ((7, 7), (7, 0)), "0: a Step is in flight"
    engine.run()
    assert engine.scheduler.deferred == 0
    assert sorted(engine.cached.values()) == [0] + [96] * 7
    assert engine.scheduler.totals.computed_tokens == 96 + 8 * (4 + MAX_TOKENS - 1)
    assert near_ties(engine.folder, [prompt] * 8, [engine.tokens[one] for one in ids], MAX_TOKENS) <= 1


def test_prompts_that_share_a_part_wait_for_that_part_only(make: Make, random_prompt: Prompt) -> None:
    engine = make(token_budget=16)
    prefix = random_prompt(32)
    long, short = prefix + random_prompt(80), prefix + random_prompt(4)
    engine.submit(long, 2)
    engine.submit(short, 2)
    engine.turn_until(lambda: "r1" in engine.cached)
    assert engine.tokens["r0"] == [], "the long prompt is still being prefilled"
    assert engine.cached["r1"] == 32
    engine.run()


def test_others_do_not_wait_for_a_prefix_that_they_do_not_share(make: Make, random_prompt: Prompt) -> None:
    engine = make(token_budget=16)
    prompt = random_prompt(100)
    engine.submit(prompt, 2)
    engine.turn()
    engine.submit(prompt, 2)
    engine.submit(random_prompt(3), 2)
    engine.turn_until(lambda: "r2" in engine.cached)
    assert engine.tokens["r0"] == [], "the first prompt is still being prefilled"
    assert "r1" not in engine.cached, "it waits for the first one's blocks"
    engine.run()


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_a_waiter_computes_the_prefix_if_its_owner_ends_early(make: Make, random_prompt: Prompt, end: str) -> None:
    engine = make(token_budget=16)
    prompt = random_prompt(100)
    engine.submit(prompt, MAX_TOKENS)
    engine.turn_times(4)
    engine.submit(prompt, MAX_TOKENS)
    engine.turn()
    if end == "cancelled":
        engine.scheduler.requests.cancel("r0")
    else:
        engine.backend.write = _raise_once(engine)  # type: ignore[method-assign]
    engine.run()
    assert engine.finished["r0"].finish.name.lower() == end
    assert 32 <= engine.cached["r1"] < 96, "what was committed is shared"
    assert near_ties(engine.folder, [prompt], [engine.tokens["r1"]], MAX_TOKENS) <= 1


def _raise_once(engine: ModelEngine) -> Callable[..., None]:
    write = engine.backend.write

    def fail(*_arguments: object) -> None:
        engine.backend.write = write  # type: ignore[method-assign]
        raise MadeToFail

    return fail


def test_a_preempted_sequence_hits_its_own_blocks_in_the_cache(make: Make, random_prompt: Prompt) -> None:
    engine = make(device_blocks=10)
    prompts = [random_prompt(20), random_prompt(20)]
    answers = engine.generate(prompts, 50)
    victim = engine.finished["r1"]
    assert victim.stats.preemptions == 1
    assert victim.stats.recomputed_tokens <= victim.members[0].lost_tokens - BLOCK
    assert engine.cached == {"r0": 0, "r1": 0}, "a start is published once, before any preemption"
    assert near_ties(engine.folder, prompts, answers, 50) <= 1
