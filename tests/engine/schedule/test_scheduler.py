"""The scheduler and its loop, over a model without tensors: refusals, and how requests end."""

import random
from collections.abc import Callable

import pytest

from blocks import Copy, Free, FreeReason, Refusal, Step, StepItem, StepRefusal, StepResult, TableChange, WindowKind
from engine.errors import BlockManagerBroken, EngineUnavailable, InvalidRequest, QueueFull, RequestExists
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits, Preemption
from engine.schedule.request import Failure, FinishReason, Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Copies, Sampled
from simulation.runner import DigestRunner, expected_tokens
from tests.engine.watched_scheduler import WatchedScheduler
from tests.engine_in_process import GREEDY, EngineInProcess

CONTEXT = 32
VOCABULARY = 50
BLOCK = 4


class Rig(EngineInProcess):
    """An engine over a fake model, with a scheduler that checks its invariants."""

    def __init__(self, device_blocks: int = 8, limits: Limits | None = None, host_blocks: int = 0) -> None:
        capacity = Capacity(CONTEXT, VOCABULARY, BLOCK, device_blocks, host_blocks)
        self.watched = WatchedScheduler(capacity, limits or Limits(16, 4, 6))
        self.runner = DigestRunner(capacity)
        self.steps: list[Step] = []
        super().__init__(self.runner, capacity, observe=lambda step, _: self.steps.append(step), scheduler=self.watched)
        self.watched.pool = lambda: self.blocks.pool

    def frees(self) -> list[Free]:
        return [free for step in self.steps for free in step.frees]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def a_request(
    request_id: str = "new", prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 2, **rest: object
) -> Request:
    return Request(request_id, prompt, GREEDY, Stopping(max_tokens), **rest)  # type: ignore[arg-type]


class TestRefusals:
    @pytest.mark.parametrize(
        ("request_", "field", "words"),
        [
            (a_request(prompt=()), "prompt", "prompt must have at least 1 token, not 0"),
            (a_request(max_tokens=-3), "stopping.max_tokens", "max_tokens must be at least 0, not -3"),
            (a_request(prompt=(1, 50)), "prompt.token_ids", "must be between 0 and 49, not 50"),
            (a_request(prompt=(1, -1)), "prompt.token_ids", "must be between 0 and 49, not -1"),
            (
                a_request(prompt=(1,) * 20, max_tokens=13),
                "stopping.max_tokens",
                r"at most 32 tokens \(the model.s context\), not 33",
            ),
            (a_request(prompt=(1,) * 20, max_tokens=6), "stopping.max_tokens", "take 7 blocks; the pool has 6"),
            (a_request(samples=((3, 50),)), "samples.generated_token_ids", "must be between 0 and 49, not 50"),
            (
                a_request(samples=((3, 4),)),
                "samples.generated_token_ids",
                "fewer than stopping.max_tokens .2. tokens, not 2",
            ),
        ],
    )
    def test_a_request_that_can_never_be_served_is_refused(self, request_: Request, field: str, words: str) -> None:
        rig = Rig(device_blocks=6)
        with pytest.raises(InvalidRequest, match=words) as refused:
            rig.scheduler.requests.submit(request_)
        assert refused.value.field == field
        assert rig.scheduler.empty

    @pytest.mark.parametrize(
        "request_",
        [
            a_request(prompt=(1,) * 20, max_tokens=12),
            a_request(prompt=(0, 49)),
            a_request(prompt=(1,) * 20, max_tokens=5),
            a_request(samples=((3,),)),
        ],
    )
    def test_a_request_that_just_fits_is_accepted(self, request_: Request) -> None:
        blocks = 8 if request_.stopping.max_tokens == 12 else 6
        rig = Rig(device_blocks=blocks)
        rig.take(request_)
        rig.run()
        assert rig.finished["new"].finish is FinishReason.LENGTH

    def test_the_id_of_a_live_request_is_refused_until_it_ends(self, rig: Rig) -> None:
        rig.submit([1], 3, request_id="a")
        for _ in range(4):
            with pytest.raises(RequestExists, match="'a' is in use by a live request") as refused:
                rig.scheduler.requests.submit(a_request("a"))
            assert refused.value.field == "request_id"
            rig.turn()
        rig.run()
        rig.scheduler.requests.submit(a_request("a"))

    def test_a_full_queue_refuses_until_a_request_ends(self, rig: Rig) -> None:
        for _ in range(6):
            rig.submit([1], 3)
        with pytest.raises(QueueFull, match="6 requests wait"):
            rig.scheduler.requests.submit(a_request())
        rig.scheduler.requests.cancel("r3")
        rig.submit([1], 3)
        with pytest.raises(QueueFull):
            rig.scheduler.requests.submit(a_request())

    def test_admitting_requests_still_count_as_waiting(self, rig: Rig) -> None:
        rig.blocks.delay = 3
        rig.submit([1], 3)
        rig.turn()
        assert (rig.scheduler.waiting, rig.scheduler.running, rig.scheduler.step_in_flight) == (1, 0, True)
        for _ in range(5):
            rig.submit([1], 3)
        with pytest.raises(QueueFull):
            rig.scheduler.requests.submit(a_request())

    def test_a_draining_engine_refuses_new_requests_and_finishes_live_ones(self, rig: Rig) -> None:
        rig.submit([1, 2], 3)
        rig.submit([3, 4], 3)
        rig.turn()
        rig.scheduler.requests.drain()
        with pytest.raises(EngineUnavailable, match="draining"):
            rig.scheduler.requests.submit(a_request())
        rig.run()
        assert {one.finish for one in rig.finished.values()} == {FinishReason.LENGTH}

    @pytest.mark.parametrize(
        "request_",
        [
            a_request("live"),
            a_request(prompt=()),
            a_request(prompt=(1,) * 30, max_tokens=3),
            a_request(prompt=(99,)),
            a_request(),
        ],
        ids=["duplicate", "empty", "long", "outside the vocabulary", "queue full"],
    )
    def test_a_refusal_changes_nothing(self, request_: Request) -> None:
        def outcome(refuse: bool) -> tuple[object, ...]:
            rig = Rig(limits=Limits(16, 1, 3))
            rig.submit([1, 2, 3], 4, request_id="live")
            rig.turn_times(2)
            for _ in range(3):
                rig.submit([4, 5], 2)
            before = (rig.scheduler.waiting, rig.scheduler.running, rig.scheduler.totals)
            if refuse:
                with pytest.raises((InvalidRequest, RequestExists, QueueFull)):
                    rig.scheduler.requests.submit(request_)
            assert before == (rig.scheduler.waiting, rig.scheduler.running, rig.scheduler.totals)
            rig.run()
            return rig.steps, rig.tokens, rig.runner.plans

        assert outcome(refuse=True) == outcome(refuse=False)


class TestLimits:
    @pytest.mark.parametrize("field", ["token_budget", "max_sequences", "max_waiting"])
    @pytest.mark.parametrize("value", [0, -1])
    def test_a_limit_below_one_is_refused_naming_the_field(self, field: str, value: int) -> None:
        with pytest.raises(ValueError, match=f"{field} must be at least 1, not {value}"):
            Limits(**{field: value})

    def test_each_sequence_needs_a_token_of_the_budget(self) -> None:
        Limits(token_budget=8, max_sequences=8)
        with pytest.raises(ValueError, match=r"token_budget must be at least max_sequences \(8\), not 7"):
            Limits(token_budget=7, max_sequences=8)

    def test_no_more_than_max_sequences_hold_blocks(self) -> None:
        rig = Rig(limits=Limits(16, 2, 6))
        for number in range(6):
            rig.submit([number], 4)
        while not rig.scheduler.empty:
            rig.turn()
            assert len(rig.blocks.pool.sequences) <= 2
        assert {one.finish for one in rig.finished.values()} == {FinishReason.LENGTH}

    def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget(self) -> None:
        rig = Rig(limits=Limits(5, 4, 6))
        rig.submit(range(18), 2)
        rig.run()
        assert [len(plan.work[0].token_ids) for plan in rig.runner.plans] == [5, 5, 5, 3, 1]
        assert [plan.work[0].samples for plan in rig.runner.plans] == [False] * 3 + [True] * 2

    def test_decoding_continues_while_a_prompt_is_prefilled(self) -> None:
        rig = Rig(limits=Limits(5, 4, 6))
        rig.submit([1], 12)
        rig.turn_until(lambda: rig.tokens["r0"])
        rig.submit(range(18), 2)
        rig.run()
        both = [[len(work.token_ids) for work in plan.work] for plan in rig.runner.plans if len(plan.work) == 2]
        assert both == [[1, 4]] * 4 + [[1, 2]] + [[1, 1]]


class TestCancel:
    def test_a_waiting_request_ends_without_requesting_blocks(self, rig: Rig) -> None:
        name = rig.submit([1, 2], 3)
        rig.scheduler.requests.cancel(name)
        rig.turn()
        assert rig.finished[name].finish is FinishReason.CANCELLED
        assert rig.scheduler.empty
        assert not rig.steps

    @pytest.mark.parametrize("turns", [0, 1, 2])
    def test_an_admitting_request_releases_its_blocks_when_they_are_granted(self, rig: Rig, turns: int) -> None:
        rig.blocks.delay = 3
        name = rig.submit([1, 2], 3)
        rig.turn_times(turns + 1)
        assert rig.scheduler.step_in_flight
        rig.scheduler.requests.cancel(name)
        rig.turn()
        assert rig.finished[name].finish is FinishReason.CANCELLED
        rig.run()
        assert not rig.runner.plans
        assert [free.reason for free in rig.frees()] == [FreeReason.CANCELLED]
        assert name not in rig.cached, "it never started"

    def test_an_admitting_request_that_is_refused_is_dropped(self) -> None:
        rig = Rig(device_blocks=4)
        rig.submit([1] * 8, 9)
        rig.turn_until(lambda: "r0" in rig.cached)
        rig.blocks.delay = 2
        name = rig.submit([2] * 8, 1)
        rig.turn()
        rig.scheduler.requests.cancel(name)
        rig.run()
        rig.watched.check_idle()
        assert rig.finished[name].finish is FinishReason.CANCELLED
        assert rig.finished["r0"].finish is FinishReason.LENGTH

    @pytest.mark.parametrize("turns", range(2, 9))
    def test_a_cancelled_request_keeps_its_tokens_and_releases_its_blocks(self, rig: Rig, turns: int) -> None:
        name = rig.submit([1, 2, 3, 4, 5], 12)
        rig.turn_times(turns)
        assert rig.scheduler.running == 1
        rig.scheduler.requests.cancel(name)
        received = list(rig.tokens[name])
        rig.run()
        assert rig.tokens[name] == received == expected_tokens(range(1, 6), 0, 12, frozenset(), VOCABULARY)[: turns - 1]
        assert [free.reason for free in rig.frees()] == [FreeReason.CANCELLED]

    def test_a_preempted_request_ends_in_the_queue(self) -> None:
        rig = Rig(device_blocks=5)
        rig.submit([1] * 4, 16)
        rig.submit([2] * 4, 16)
        rig.turn_until(lambda: rig.scheduler.totals.preemptions)
        rig.scheduler.requests.cancel("r1")
        rig.run()
        assert rig.finished["r1"].finish is FinishReason.CANCELLED
        assert rig.tokens["r1"] == expected_tokens([2] * 4, 0, 16, frozenset(), VOCABULARY)[: len(rig.tokens["r1"])]
        assert rig.finished["r0"].finish is FinishReason.LENGTH

    def test_an_unknown_or_ended_request_is_ignored(self, rig: Rig) -> None:
        name = rig.submit([1, 2], 3)
        rig.scheduler.requests.cancel("nobody")
        rig.run()
        rig.scheduler.requests.cancel(name)
        assert not rig.turn().progressed
        assert rig.finished[name].finish is FinishReason.LENGTH

    def test_cancelling_twice_is_cancelling_once(self, rig: Rig) -> None:
        name = rig.submit([1, 2], 3)
        rig.turn_times(2)
        rig.scheduler.requests.cancel(name)
        rig.scheduler.requests.cancel(name)
        rig.run()
        assert len(rig.frees()) == 1


class TestOrder:
    def test_a_request_of_higher_priority_is_admitted_first_though_it_arrived_last(self) -> None:
        rig = Rig(limits=Limits(16, 1, 6))
        for name, priority, age in (("plain", 1, 0), ("urgent", 0, 0), ("old", 1, 5)):
            rig.submit([1, 2], 1, request_id=name, priority=priority, age=age)
        rig.run()
        assert list(rig.finished) == ["urgent", "old", "plain"]

    def test_the_lowest_priority_is_preempted_when_blocks_run_out(self) -> None:
        rig = Rig(device_blocks=6)
        for name, priority in (("first", 1), ("second", 1), ("urgent", 0)):
            rig.submit([len(name)] * 3, 14, request_id=name, priority=priority)
        rig.run()
        preempted = {name: sequence.stats.preemptions for name, sequence in rig.finished.items()}
        assert preempted["urgent"] == 0
        assert preempted["second"] >= preempted["first"]
        assert preempted["second"] > 0
        assert next(iter(rig.finished)) == "urgent"

    def test_a_victims_blocks_are_freed_in_the_step_that_extends_another_group(self) -> None:
        rig = Rig(device_blocks=5)
        rig.submit([1] * 4, 16)
        rig.submit([2] * 4, 16)
        rig.run()
        needed = [step for step in rig.steps if any(f.reason is FreeReason.PREEMPTED for f in step.frees)]
        assert needed
        for step in needed:
            assert {free.preempted_for_group for free in step.frees} <= {extend.group for extend in step.extends}
        assert all(sequence.generated == 16 for sequence in rig.finished.values())

    def test_a_victim_waits_since_its_preemption_not_since_it_arrived(self) -> None:
        rig = Rig(device_blocks=5)
        rig.submit([1] * 4, 16)
        rig.submit([2] * 4, 16)
        rig.run()
        waited = [item.waited_seconds for step in rig.steps for item in step.allocates if item.request_id == "r1"]
        stats = rig.finished["r1"].stats
        (preempted,), (resumed,) = stats.preempted_at, stats.resumed_at
        assert waited[0] == 1
        assert waited[-1] == resumed - preempted, "earlier ones were refused"

    def test_no_sequence_requests_more_room_than_it_can_need(self) -> None:
        rig = Rig(device_blocks=8)
        rig.submit([1, 2, 3], 6)  # 8 slots, 2 blocks
        rig.run()
        assert max(room for step in rig.steps for extend in step.extends for _, room in extend.rooms) <= 8
        assert rig.blocks.session.totals.peak_held_blocks == 2

    def test_an_admission_leaves_room_for_the_rest_of_running_prompts(self) -> None:
        rig = Rig(device_blocks=5, limits=Limits(5, 4, 6))
        rig.submit(range(18), 2)  # in chunks, 5 blocks in the end
        rig.turn_until(lambda: "r0" in rig.cached)
        rig.submit([40] * 4, 2)  # 2 blocks in the end
        rig.run()
        assert rig.scheduler.totals.preemptions == 0
        assert [free.reason.name for free in rig.frees()] == ["FINISHED"] * 2

    def test_a_large_request_does_not_starve(self) -> None:
        rig = Rig(device_blocks=6)
        rig.submit([1] * 3, 3)
        rig.turn_times(2)
        rig.submit([2] * 20, 3, request_id="large")
        for number in range(20):
            while rig.scheduler.waiting > 3:
                rig.turn()
            rig.submit([3 + number], 3, request_id=f"small {number}")
        rig.run()
        order = list(rig.finished)
        assert order.index("large") <= 4


class TestStarvation:
    """New requests of high priority always wait."""

    def order(self, aging: float, late: int, turns: int = 120) -> list[str]:
        """Return request ids in order of completion: one of priority `late` among many of priority 0."""
        rig = Rig(limits=Limits(16, 1, 50, priority_aging=aging))
        rig.submit([1, 2, 3], 3, request_id="low", priority=late)
        while rig.turns < turns:
            if rig.scheduler.waiting < 3:
                rig.submit([rig.turns % VOCABULARY] * 3, 3)
            rig.turn()
        rig.run()
        return list(rig.finished)

    def test_within_a_priority_no_request_starves(self) -> None:
        assert self.order(aging=0.0, late=0)[0] == "low"

    def test_without_aging_a_lower_priority_waits_for_all_higher_ones(self) -> None:
        assert self.order(aging=0.0, late=1)[-1] == "low"

    @pytest.mark.parametrize("late", [1, 2])
    def test_with_aging_only_requests_within_its_delay_overtake_it(self, late: int) -> None:
        order, more = self.order(aging=20.0, late=late), self.order(aging=20.0, late=late, turns=300)
        place = order.index("low")
        assert 0 < place < len(order) - 1
        assert more.index("low") == place, "later arrivals do not overtake it"

    def test_the_order_is_kept_through_preemption(self) -> None:
        rig = Rig(device_blocks=5, limits=Limits(16, 4, 6, priority_aging=5.0))
        rig.submit([1] * 4, 14, request_id="old", priority=1, age=8)
        rig.submit([2] * 4, 14, request_id="new", priority=0)
        rig.run()
        assert rig.finished["new"].stats.preemptions > 0 == rig.finished["old"].stats.preemptions
        assert list(rig.finished) == ["old", "new"]


class TestWatermark:
    @pytest.mark.parametrize(("fraction", "ends_first"), [(0.0, "long"), (0.3, "short")])
    def test_an_admission_beside_others_leaves_the_watermark_free(self, fraction: float, ends_first: str) -> None:
        rig = Rig(device_blocks=10, limits=Limits(32, 4, 6, admission_watermark=fraction))
        rig.submit([1] * 3, 8, request_id="short")
        rig.turn()
        rig.submit([2] * 28, 2, request_id="long")  # 8 blocks with the one that it may grow into
        rig.run()
        assert next(iter(rig.finished)) == ends_first

    def test_a_request_that_runs_alone_may_use_the_watermark(self) -> None:
        rig = Rig(limits=Limits(32, 4, 6, admission_watermark=0.5))
        rig.submit([1] * 28, 4)
        rig.run()
        assert rig.finished["r0"].generated == 4

    @pytest.mark.parametrize(("growth_reserve", "running"), [(True, 1), (False, 2)])
    def test_a_block_for_each_running_sequence_stays_free_with_the_growth_reserve(
        self, growth_reserve: bool, running: int
    ) -> None:
        rig = Rig(device_blocks=9, limits=Limits(32, 4, 6, growth_reserve=growth_reserve))
        rig.submit([1] * 2, 8)
        rig.turn()
        rig.submit([2] * 30, 2)  # 8 blocks, and as many are left
        for _ in range(2):
            rig.turn()
        assert rig.scheduler.running == running

    def test_a_swap_in_leaves_the_watermark_free_too(self) -> None:
        preempted = []
        for fraction in (0.0, 0.4):
            limits = Limits(16, 4, 6, Preemption.SWAP, fraction)
            rig = Rig(6, limits, host_blocks=12)
            for number in range(3):
                rig.submit([number] * 6, 12)
            rig.run()
            assert all(group.generated == 12 for group in rig.finished.values())
            preempted.append(rig.scheduler.totals.preemptions)
        assert preempted[1] < preempted[0]

    @pytest.mark.parametrize(("blocks", "left_free"), [(99, 0), (100, 1), (299, 2)])
    def test_the_watermark_of_a_small_pool_is_zero(self, blocks: int, left_free: int) -> None:
        assert Limits(admission_watermark=0.01).watermark(blocks) == left_free


@pytest.mark.parametrize("length", [3, 4, 5])
@pytest.mark.parametrize(("late", "most"), [(0, 0), (1, 1)])
def test_a_result_may_take_a_step_longer_without_a_delay(length: int, late: int, most: int) -> None:
    rig = Rig()
    rig.submit([1] * length, 24)
    rig.turn_until(lambda: rig.tokens["r0"])
    start, sent = rig.turns, len(rig.steps)
    while "r0" not in rig.finished:
        rig.turn()
        if len(rig.steps) > sent:
            rig.blocks.delay, sent = late, len(rig.steps)
    assert rig.turns - start <= 23 + most


class TestFailures:
    def test_a_failing_step_ends_its_own_requests_only(self, rig: Rig) -> None:
        rig.submit([1, 2], 8)
        rig.turn_until(lambda: rig.tokens["r0"])
        rig.submit([3, 4], 8)
        rig.runner.fail_next = True
        rig.run()
        assert rig.finished["r0"].finish is FinishReason.FAILED
        assert rig.finished["r0"].failure is Failure.STEP
        assert "failed" in rig.finished["r0"].detail
        assert rig.tokens["r1"] == expected_tokens([3, 4], 0, 8, frozenset(), VOCABULARY)
        assert [free.reason.name for free in rig.frees()] == ["FAILED", "FINISHED"]

    def test_fail_all_ends_requests_in_every_state(self, rig: Rig) -> None:
        rig.submit([1, 2], 8)
        rig.turn_until(lambda: rig.tokens["r0"])
        rig.blocks.delay = 2
        rig.submit([3, 4], 8)
        rig.turn()
        rig.submit([5, 6], 8)
        assert (rig.scheduler.running, rig.scheduler.waiting) == (1, 2)
        rig.scheduler.requests.fail_all(Failure.BLOCK_MANAGER, "disconnected")
        rig.run()
        assert {(one.finish, one.failure, one.detail) for one in rig.finished.values()} == {
            (FinishReason.FAILED, Failure.BLOCK_MANAGER, "disconnected")
        }
        rig.watched.check_idle()


class TestLateResults:
    def test_late_results_skip_no_sequence_within_a_step(self, rig: Rig) -> None:
        for length in (1, 2, 3):
            rig.submit([7] * length, 20)
        rig.run()
        assert rig.scheduler.totals.skipped == 0
        assert rig.scheduler.totals.planned == sum(len(plan.work) for plan in rig.runner.plans)

    def test_late_results_are_counted_by_the_skipped_sequences(self, rig: Rig) -> None:
        rig.submit([1, 2, 3], 20)
        turns = 0
        while not rig.scheduler.empty:
            if turns % 4 == 0:
                rig.blocks.delay = 3
            rig.turn()
            turns += 1
        assert rig.scheduler.totals.skipped > 0
        assert rig.scheduler.totals.planned == len(rig.runner.plans)
        assert rig.scheduler.totals.skipped <= turns - len(rig.runner.plans)


class TestDisconnectedBlockManager:
    @pytest.mark.parametrize("disconnected", [1, 2, 7])
    @pytest.mark.parametrize("turns", range(1, 14))
    def test_a_reconnection_loses_and_repeats_no_token(self, rig: Rig, turns: int, disconnected: int) -> None:
        prompts = [[1, 2, 3, 4, 5], [6, 7], [8] * 9]
        for prompt in prompts:
            rig.submit(prompt, 6)
        rig.turn_times(turns)
        rig.reconnect(disconnected)
        rig.run()
        for prompt, tokens in zip(prompts, rig.tokens.values(), strict=True):
            assert tokens == expected_tokens(prompt, 0, 6, frozenset(), VOCABULARY)
        assert {(one.stats.preemptions, one.stats.recomputed_tokens) for one in rig.finished.values()} == {(0, 0)}
        fed = [work.token_ids for plan in rig.runner.plans for work in plan.work]
        assert sum(map(len, fed)) == rig.scheduler.totals.computed_tokens == sum(len(p) + 6 - 1 for p in prompts)
        rig.watched.check_idle()

    def test_cached_prefixes_survive_a_reconnection(self, rig: Rig) -> None:
        rig.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
        rig.run()
        rig.reconnect()
        again = rig.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
        rig.run()
        assert rig.cached[again] == 8

    def test_a_reconnection_counts_as_progress(self, rig: Rig) -> None:
        # Results may be pending already, and an idle engine would not receive them.
        rig.submit([1, 2, 3, 4, 5], 6)
        rig.turn_times(2)
        rig.blocks.lose()
        while rig.turn().progressed:
            pass
        rig.blocks.restore()
        assert rig.turn().progressed

    def test_a_reconnection_delivers_the_frees_of_a_cancelled_request(self, rig: Rig) -> None:
        name = rig.submit([1, 2, 3, 4, 5], 6)
        rig.turn_times(2)
        rig.blocks.lose()
        rig.scheduler.requests.cancel(name)
        rig.turn()
        assert rig.frees() == []
        rig.blocks.restore()
        rig.run()
        assert [free.reason.name for free in rig.frees()] == ["CANCELLED"]
        rig.watched.check_idle()


@pytest.mark.parametrize("seed", range(1, 6))
def test_recomputed_tokens_are_those_fed_twice(seed: int) -> None:
    source = random.Random(seed)
    rig = Rig(device_blocks=10, limits=Limits(12, 12, 99))
    for number in range(20):
        # First tokens differ, so that requests share no blocks.
        rig.submit([number, *(source.randrange(50) for _ in range(source.randrange(4)))], source.randrange(12, 26))
        for _ in range(source.randrange(4)):
            rig.turn()
    rig.run()
    fed: dict[int, int] = {}
    twice: dict[int, int] = {}
    for work in (work for plan in rig.runner.plans for work in plan.work):
        reached = fed.get(work.sequence, 0)
        twice[work.sequence] = twice.get(work.sequence, 0) + max(0, min(work.end, reached) - work.start)
        fed[work.sequence] = max(reached, work.end)
    assert {one.id: one.stats.recomputed_tokens for one in rig.finished.values()} == twice
    totals = rig.scheduler.totals
    assert max(one.stats.preemptions for one in rig.finished.values()) > 1, "some requests are preempted more than once"
    assert totals.recomputed_tokens == sum(twice.values())
    assert totals.computed_tokens == sum(len(work.token_ids) for plan in rig.runner.plans for work in plan.work)


@pytest.mark.parametrize("generated", range(1, 6))
def test_a_request_continues_after_a_failover(rig: Rig, generated: int) -> None:
    whole = expected_tokens([1, 2, 3], 9, 6, frozenset(), VOCABULARY)
    sampling = Sampling(seed=9)
    rig.take(Request("moved", (1, 2, 3), sampling, Stopping(6), samples=(tuple(whole[:generated]),)))
    rig.run()
    assert rig.tokens["moved"] == whole[generated:]
    assert rig.finished["moved"].finish is FinishReason.LENGTH


@pytest.fixture
def scheduler() -> Scheduler:
    """A scheduler with step 1 in flight."""
    scheduler = Scheduler(Capacity(CONTEXT, VOCABULARY, BLOCK, 8), Limits(16, 4, 6))
    scheduler.requests.submit(a_request())
    assert scheduler.build_step(scheduler.plan(0.0))
    return scheduler


class TestInvalidResults:
    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            (StepResult(2, (), (), (), 8), "result of step 2, but step 1 is in flight"),
            *(
                (StepResult(1, (Refusal(item, 0, StepRefusal.INVALID, "no"),), (), (), 8), f"{word} was refused: no")
                for item, word in ((StepItem.COMMIT, "commit"), (StepItem.FREE, "free"), (StepItem.LENGTH, "length"))
            ),
            (StepResult(1, (), (TableChange(77, 0, [1], 4, 0),), (), 7), "table of sequence 77"),
        ],
    )
    def test_a_contradiction_is_an_error(self, scheduler: Scheduler, answer: StepResult, words: str) -> None:
        with pytest.raises(BlockManagerBroken, match=words):
            scheduler.apply(answer)

    def test_a_result_without_a_step_in_flight_is_an_error(self) -> None:
        scheduler = Scheduler(Capacity(CONTEXT, VOCABULARY, BLOCK, 8), Limits(16, 4, 6))
        with pytest.raises(BlockManagerBroken, match="result of step 1, but step None is in flight"):
            scheduler.apply(StepResult(1, (), (), (), 8))


class TestCopies:
    """Copies of results, which no item of a Step makes today."""

    COPIES = Copies((Copy(3, 1),), (Copy(2, 7),), (Copy(5, 1), Copy(6, 2)))

    @pytest.fixture
    def answered(self, scheduler: Scheduler) -> Scheduler:
        scheduler.apply(self.answer(1, [TableChange(1, 0, [1], 4, 0)]))
        return scheduler

    def answer(self, step: int, tables: list[TableChange]) -> StepResult:
        to_host, to_device, within = self.COPIES[:3]
        return StepResult(step, (), tuple(tables), within, 7, device_to_host=to_host, host_to_device=to_device)

    def test_copies_run_once_with_the_next_step(self, answered: Scheduler) -> None:
        plan = answered.plan(0.0)
        assert plan
        assert plan.copies == (self.COPIES,)
        assert [work.sequence for work in plan.work] == [1]
        answered.publish(plan, [Sampled(9)], 0.0)
        following = answered.plan(0.0)
        assert following
        assert following.copies == ()

    def test_copies_run_even_if_their_sequence_has_ended(self, answered: Scheduler) -> None:
        answered.requests.cancel("new")
        plan = answered.plan(0.0)
        assert plan
        assert (plan.copies, plan.work) == ((self.COPIES,), ())
        assert answered.plan(0.0) is None

    def test_copies_of_two_results_are_not_merged(self, answered: Scheduler) -> None:
        answered.requests.cancel("new")
        assert answered.build_step(None)
        answered.apply(self.answer(2, []))
        answered.requests.submit(a_request())
        assert answered.build_step(None)
        answered.apply(StepResult(3, (), (TableChange(2, 0, [1], 4, 0),), (), 7))
        plan = answered.plan(0.0)
        assert plan
        assert plan.copies == (self.COPIES, self.COPIES)


def test_every_end_frees_its_blocks_with_its_reason(rig: Rig) -> None:
    ends: dict[str, Callable[[], None]] = {
        "FINISHED": lambda: None,
        "CANCELLED": lambda: rig.scheduler.requests.cancel("CANCELLED"),
        "FAILED": lambda: setattr(rig.runner, "fail_next", True),
    }
    for name, end in ends.items():
        rig.submit([1, 2, 3], 4, request_id=name)
        rig.turn_times(2)
        end()
        rig.run()
    assert [free.reason.name for free in rig.frees()] == list(ends)
    assert {reason.name for reason in FreeReason} == {*ends, "PREEMPTED", "PRUNED"}


def test_blocks_that_an_earlier_process_left_withheld_are_no_capacity() -> None:
    scheduler = Scheduler(Capacity(100, VOCABULARY, 4, 4), Limits(), withheld=[[2]])
    with pytest.raises(EngineUnavailable, match="take 4 blocks; the pool has 3; others are withheld"):
        scheduler.requests.submit(Request("large", (1,) * 13, Sampling(), Stopping(3)))
    with pytest.raises(InvalidRequest, match="take 5 blocks; the pool has 4"):
        scheduler.requests.submit(Request("too large", (1,) * 17, Sampling(), Stopping(3)))
    scheduler.requests.submit(Request("small", (1,) * 9, Sampling(), Stopping(3)))


def test_blocks_of_a_window_kind_that_were_left_withheld_are_no_capacity_either() -> None:
    capacity = Capacity(100, VOCABULARY, 4, 20, windows=(WindowKind("window-8", 8, 4),), step_tokens=4)
    large = Request("large", (1,) * 13, Sampling(), Stopping(3))
    Scheduler(capacity, Limits()).requests.submit(large)
    with pytest.raises(EngineUnavailable, match="take 4 blocks of kind window-8; the pool has 3; others are withheld"):
        Scheduler(capacity, Limits(), withheld=[[], [2]]).requests.submit(large)


def test_a_block_that_is_withheld_twice_counts_once() -> None:
    scheduler = Scheduler(Capacity(100, VOCABULARY, 4, 4), Limits(), withheld=[[2]])
    scheduler.requests.withhold([[2]])
    assert scheduler.capacity.device_blocks == 3


def test_a_request_is_served_after_one_that_a_withheld_block_left_no_room_for() -> None:
    rig = Rig(device_blocks=4)
    rig.blocks.pool.withhold([2], [])
    whole_pool = rig.submit((1,) * 13, 3)
    rig.turn_until(lambda: whole_pool in rig.finished)
    assert rig.finished[whole_pool].failure is Failure.BLOCK_MANAGER
    fits = rig.submit((1, 2, 3), 2)
    rig.run()
    assert rig.tokens[fits] == expected_tokens((1, 2, 3), 0, 2, frozenset(), VOCABULARY)
