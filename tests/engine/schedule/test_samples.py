"""Several samples of one prompt: prefilled once, shared, copied on write, with unchanged tokens."""

import random

import pytest
import torch

from engine.errors import InvalidRequest
from engine.schedule.limits import Preemption
from engine.schedule.pool.preemption import PreemptionCosts
from engine.schedule.request import BeamSearch, Failure, FinishReason, Request, Sampling, Stopping
from engine.schedule.step_plan import StepPlan, Work
from tests.engine_in_process import ModelEngine

BLOCK = 4
SAMPLED = Sampling(temperature=1.0, seed=7)


def prompt(length, seed=1):
    draw = random.Random(seed)
    return [draw.randrange(3, 380) for _ in range(length)]


@pytest.fixture
def alone(folder):
    """Answers of three samples (prompt of ten tokens, twelve tokens each) in an idle engine."""
    engine = ModelEngine(folder, block_size=BLOCK)
    name = engine.submit(prompt(10), 12, sampling=SAMPLED, samples=3)
    engine.run()
    return engine.samples[name]


def test_samples_differ_and_the_first_equals_a_single_sample(folder, alone):
    engine = ModelEngine(folder, block_size=BLOCK)
    assert engine.generate([prompt(10)], 12, sampling=SAMPLED) == [alone[0]]
    assert len({tuple(sample) for sample in alone}) == 3
    assert [len(sample) for sample in alone] == [12, 12, 12]


@pytest.mark.parametrize("length", [1, 4, 9, 12])
def test_the_prompt_is_computed_once_and_its_whole_blocks_are_shared(folder, length):
    results = []
    engine = ModelEngine(folder, block_size=BLOCK, observe=lambda step, result: results.append((step, result)))
    name = engine.submit(prompt(length), 5, sampling=SAMPLED, samples=4)
    engine.run()
    group = engine.finished[name]
    assert engine.scheduler.totals.computed_tokens == length + 4 * 4, "the last token of a sample is never fed"
    assert group.stats.recomputed_tokens == 0
    forks = [fork for step, _ in results for fork in step.forks]
    copies = [copy for _, applied in results for copy in applied.result.copies]
    assert [fork.length for fork in forks] == [length] * 3
    assert len(copies) == (3 if length % BLOCK else 0), "the last holder writes to the last block without a copy"


@pytest.mark.parametrize("budget", [3, 5, 512])
def test_samples_do_not_depend_on_chunks_and_other_requests(folder, alone, budget):
    engine = ModelEngine(folder, block_size=BLOCK, token_budget=budget, max_sequences=min(64, budget))
    others = [engine.submit(prompt(9, seed), 8, sampling=Sampling(seed=seed)) for seed in range(2, 4)]
    name = engine.submit(prompt(10), 12, sampling=SAMPLED, samples=3)
    engine.run()
    assert engine.samples[name] == alone
    assert all(engine.finished[other].finish is FinishReason.LENGTH for other in others)


@pytest.mark.parametrize("preemption", [Preemption.RECOMPUTE, Preemption.SWAP])
@pytest.mark.parametrize("head_start", range(0, 24, 3))
def test_samples_are_the_same_after_preemptions_of_each_kind(folder, alone, preemption, head_start):
    engine = ModelEngine(folder, block_size=BLOCK, device_blocks=16, host_blocks=24, preemption=preemption)
    engine.submit(prompt(4, 5), 58, priority=-1)  # it grows until it needs nearly all blocks
    engine.turn_times(head_start)
    name = engine.submit(prompt(10), 12, sampling=SAMPLED, samples=3)
    engine.run()
    group = engine.finished[name]
    assert engine.samples[name] == alone
    assert group.stats.preemptions >= 1
    if preemption is Preemption.SWAP:
        assert (group.stats.recomputed_tokens, group.stats.swapped_tokens > 0) == (0, True)
    else:
        assert (group.stats.recomputed_tokens > 0, group.stats.swapped_tokens) == (True, 0)


def test_a_sample_that_stops_early_releases_its_blocks_while_the_others_continue(folder, alone):
    stop = next(token for token in alone[1] if all(token not in other for other in (alone[0], alone[2])))
    end = alone[1].index(stop) + 1
    engine = ModelEngine(folder, block_size=BLOCK)
    name = engine.submit(prompt(10), 12, sampling=SAMPLED, samples=3, stop=[stop])
    sequences = set()
    while not engine.scheduler.empty:
        engine.turn()
        sequences.add(len(engine.blocks.pool.sequences))
    assert engine.samples[name] == [alone[0], alone[1][:end], alone[2]]
    ends = [(member.finish, member.stop_token) for member in engine.finished[name].members]
    assert ends == [(FinishReason.LENGTH, None), (FinishReason.STOP, stop), (FinishReason.LENGTH, None)]
    assert 2 in sequences
    engine.assert_released()


def test_samples_are_forked_from_a_trunk_that_ended_with_its_first_token(folder, alone):
    stop = alone[0][0]
    assert all(stop not in other for other in alone[1:])
    engine = ModelEngine(folder, block_size=BLOCK)
    name = engine.submit(prompt(10), 12, sampling=SAMPLED, samples=3, stop=[stop])
    engine.run()
    assert engine.samples[name] == [[stop], *alone[1:]]


def test_more_samples_than_the_engine_runs_sequences_are_refused_naming_both_numbers(folder):
    engine = ModelEngine(folder, max_sequences=4)
    with pytest.raises(
        InvalidRequest, match=r"sample_count must be between 1 and 4 \(max_sequences\), not 5"
    ) as caught:
        engine.submit(prompt(3), 4, samples=5)
    assert caught.value.field == "sampling.sample_count"
    assert engine.scheduler.empty


def test_samples_that_can_never_fit_together_are_refused(folder):
    engine = ModelEngine(folder, block_size=BLOCK, device_blocks=10)
    engine.submit(prompt(8), 9, samples=4)  # two blocks in common, and two for each
    with pytest.raises(InvalidRequest, match="for each of 5 samples take 12 blocks; the pool has 10"):
        engine.submit(prompt(8), 9, samples=5)
    engine.run()


class TestSwapping:
    def test_the_bytes_of_a_swapped_and_resumed_sequence_are_the_same(self, folder):
        engine = ModelEngine(folder, block_size=BLOCK, device_blocks=8, host_blocks=8, preemption=Preemption.SWAP)
        for seed in (1, 2):
            engine.submit(prompt(8, seed), 14)
        while engine.scheduler.running < 2:
            engine.turn()
        (sequence,) = engine.scheduler._queue.running[1].members
        while not sequence.swapped:
            before, computed = slots(engine, sequence), sequence.computed
            engine.turn()
        assert engine.blocks.pool.sequences[sequence.id].swapped
        while sequence.swapped:
            engine.turn()
        engine.turn()  # the copies are made before the next step
        assert (slots(engine, sequence)[:computed] == before[:computed]).all()
        engine.run()
        assert engine.finished["r1"].stats.swapped_tokens + 1 >= computed > 8, "the step in flight computed one more"

    def test_ten_groups_that_share_100_blocks_are_swapped_out_together_with_one_copy_of_them(self, folder):
        """The host tier has 160 blocks: 100 shared ones and about six for each group.

        The groups start beside a request of higher priority, whose sixty samples grow until they need all blocks.
        """
        sizes = {"device_blocks": 515, "host_blocks": 160, "token_budget": 256, "max_sequences": 256}
        engine = ModelEngine(folder, block_size=BLOCK, **sizes, preemption=Preemption.SWAP)
        shared = prompt(400)
        engine.generate([[*shared, 7]], 1)
        engine.submit(prompt(17, 9), 28, sampling=Sampling(seed=1), samples=60, priority=-1)
        engine.turn_times(6)
        names = [submit_pair(engine, shared, number) for number in range(10)]
        groups, tables = 0, 0
        while not engine.scheduler.empty:
            engine.turn()
            swapped = [one for one in engine.blocks.pool.sequences.values() if one.swapped]
            groups = max(groups, len({one.group for one in swapped}))
            tables = max(tables, sum(len(one.table) for one in swapped))
        assert groups == 10
        assert tables > 10 * 150, "tables ten times as long as the tier, because they have the prefix in common"
        assert all(engine.finished[name].stats.preemptions == 1 for name in names)
        assert engine.scheduler.totals.recomputed_tokens == 0
        plain = ModelEngine(folder, block_size=BLOCK, device_blocks=2000, max_sequences=256)
        pairs = [submit_pair(plain, shared, number) for number in range(10)]
        plain.run()
        assert [engine.samples[name] for name in names] == [plain.samples[name] for name in pairs]

    def test_a_full_host_tier_means_recomputation(self, folder):
        engine = ModelEngine(folder, block_size=BLOCK, device_blocks=8, host_blocks=1, preemption=Preemption.SWAP)
        answers = engine.generate([prompt(8), prompt(8, 2)], 14)
        assert engine.scheduler.totals.preemptions == 1
        assert engine.scheduler.totals.swapped_tokens == 0
        assert engine.scheduler.totals.recomputed_tokens > 0
        assert answers == [ModelEngine(folder).generate([prompt(8, seed)], 14)[0] for seed in (1, 2)]

    def test_a_cancelled_request_releases_its_blocks_in_both_tiers(self, folder):
        engine = ModelEngine(folder, block_size=BLOCK, device_blocks=8, host_blocks=8, preemption=Preemption.SWAP)
        for seed in (1, 2):
            engine.submit(prompt(8, seed), 14)
        engine.turn_until(lambda: engine.scheduler.totals.swapped_tokens)
        engine.scheduler.requests.cancel("r1")
        engine.run()
        assert engine.blocks.pool.host.counts.held == 0
        assert engine.finished["r1"].finish is FinishReason.CANCELLED


def submit_pair(engine, shared, number):
    """Submit a request of two sequences that starts with `shared`: a beam search, or every third time samples."""
    if number % 3 == 1:
        return engine.submit([*shared, 100 + number], 24, sampling=Sampling(seed=number), samples=2)
    return engine.submit([*shared, 100 + number], 24, beam_search=BeamSearch(2), samples=2)


def slots(engine, sequence):
    """K and V of a sequence's slots, `[slots, layers, 2, heads, size]`."""
    backend, blocks = engine.backend, list(sequence.table)
    parts = [
        part(layer)[blocks] for layer in range(len(backend.geometry.layers)) for part in (backend.keys, backend.values)
    ]
    return torch.stack(parts, dim=2).unflatten(2, (-1, 2)).flatten(0, 1)


@pytest.mark.parametrize("turns", [0, 1, 4])
def test_an_expired_request_fails_in_the_queue_and_while_it_runs(folder, turns):
    engine = ModelEngine(folder, block_size=BLOCK, device_blocks=12)
    other = engine.submit(prompt(30, 4), 16, priority=-1)
    request = Request("late", tuple(prompt(14)), SAMPLED, Stopping(6), samples=((), ()), deadline=float(turns))
    engine.take(request)
    quick = engine.submit(prompt(3, 6), 2, request_id="quick")
    engine.run()
    late = engine.finished["late"]
    assert {member.finish for member in late.members} == {FinishReason.FAILED}
    assert late.failure is Failure.DEADLINE_QUEUED
    assert late.detail == "deadline exceeded in the queue"
    assert [len(engine.tokens[name]) for name in (other, quick)] == [16, 2]


def test_tokens_generated_before_the_deadline_are_delivered(folder, alone):
    engine = ModelEngine(folder, block_size=BLOCK)
    engine.take(Request("late", tuple(prompt(10)), SAMPLED, Stopping(12), samples=((), (), ()), deadline=8.0))
    engine.run()
    late = engine.finished["late"]
    assert (late.failure, late.detail) == (Failure.DEADLINE, "deadline exceeded while running")
    assert [len(sample) for sample in engine.samples["late"]] == [len(engine.samples["late"][0])] * 3
    assert 0 < len(engine.samples["late"][0]) < 12
    assert [whole[: len(part)] for whole, part in zip(alone, engine.samples["late"], strict=True)] == engine.samples[
        "late"
    ]


def test_costs_decide_between_swap_and_recomputation():
    costs = PreemptionCosts(seconds_per_block=0.01)
    assert costs.swap_is_cheaper(1, 100), "swapping is the default before computing is measured"
    fed = Work(1, tuple(range(20)), 0, (1,), False, SAMPLED)
    costs.observe(StepPlan(1, (), (fed._replace(token_ids=(1,)),)), 5.0)
    costs.observe(StepPlan(2, (), (fed,)), 0.2)  # 10 ms a token
    assert costs.swap_is_cheaper(10, 4)
    assert not costs.swap_is_cheaper(10, 5)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_loop_that_sleeps_only_for_a_reason_goes_on_after_a_fork_without_children(folder, alone, kept):
    engine = ModelEngine(folder, block_size=32)  # so that the kept sample has room, and needs no answer
    engine.turn_seconds = 0.001
    name = engine.submit(prompt(10), 12, sampling=SAMPLED, samples=3)
    engine.turn_until(lambda: all(engine.samples[name]))
    for index in {0, 1, 2} - {kept}:
        engine.scheduler.requests.end_sample(name, index)
    while name not in engine.finished:
        turn = engine.turn()
        assert turn.idle is None, "no answer is late, so there is no reason to sleep"
    assert engine.samples[name][kept] == alone[kept]
    engine.run()
