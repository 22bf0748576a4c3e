"""Cases of docs/kv-acceptance.md about admission: scheduler and KV manager together."""

import kvmanager
from blocks import Allocate, Step, StepItem, StepRefusal
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from simulation.runner import DigestRunner, expected_tokens
from tests.engine_in_process import EngineInProcess

VOCABULARY = 50


class Rig(EngineInProcess):
    """An engine over a fake model, with all its Steps and results."""

    def __init__(self, device_blocks: int, block_size: int) -> None:
        self.steps: list[tuple[Step, kvmanager.AppliedStep]] = []
        capacity = Capacity(32, VOCABULARY, block_size, device_blocks)
        super().__init__(
            DigestRunner(capacity),
            capacity,
            Limits(16, 4, 6),
            observe=lambda *step: self.steps.append(step),
        )

    def allocates(self) -> list[Allocate]:
        return [allocate for step, _ in self.steps for allocate in step.allocates]

    def refused(self) -> list[tuple[StepItem, StepRefusal]]:
        return [(refusal.item, refusal.reason) for _, applied in self.steps for refusal in applied.result.refusals]


def test_65_of_two_that_do_not_fit_to_their_ends_one_is_preempted_once_and_resumes_with_hits() -> None:
    rig = Rig(device_blocks=6, block_size=2)
    # Each needs 8 slots: 4 of the 6 blocks. A prompt of 5 would wait, because an admission leaves a spare block.
    prompts = ([1, 2, 3], [6, 7, 8])
    names = [rig.submit(prompt, 6) for prompt in prompts]
    rig.run()
    assert sorted(one.stats.preemptions for one in rig.finished.values()) == [0, 1]
    *_, resumed = [table for _, applied in rig.steps for table in applied.result.tables if table.first_index == 0]
    assert resumed.cached_tokens > 0
    assert [rig.tokens[name] for name in names] == [
        expected_tokens(prompt, 0, 6, frozenset(), VOCABULARY) for prompt in prompts
    ]
    assert rig.blocks.pool.device.available == 6


def test_66_an_admission_leaves_spare_blocks_unless_the_engine_is_empty_and_running_requests_may_use_them() -> None:
    rig = Rig(device_blocks=4, block_size=4)
    rig.submit([9] * 16, 1, request_id="alone")
    rig.run()
    assert ([one.spare_blocks for one in rig.allocates()], rig.refused()) == ([0], [])

    rig.submit([1] * 3, 6, request_id="runs")  # two blocks in the end
    rig.turn_until(lambda: rig.tokens["runs"])
    rig.submit([2] * 12, 1, request_id="waits")  # three blocks, as many as are left
    rig.run()
    first, *_, admitted = [one for one in rig.allocates() if one.request_id == "waits"]
    assert (first.spare_blocks, admitted.spare_blocks) == (1, 0)
    assert set(rig.refused()) == {(StepItem.ALLOCATE, StepRefusal.OUT_OF_BLOCKS)}
    assert list(rig.finished) == ["alone", "runs", "waits"]
    assert {one.stats.preemptions for one in rig.finished.values()} == {0}


def test_67_a_request_that_was_refused_and_tried_again_is_counted_once() -> None:
    rig = Rig(device_blocks=4, block_size=4)
    rig.submit([1] * 3, 6)
    rig.turn_until(lambda: rig.tokens["r0"])
    rig.submit([2] * 12, 1)
    rig.run()
    assert len(rig.allocates()) > 2
    totals = rig.blocks.session.totals
    assert (totals.prefix_query_tokens, totals.prefix_hit_tokens) == (15, 0)


def test_67_a_resumed_request_is_looked_up_again_but_its_prompt_is_counted_once() -> None:
    rig = Rig(device_blocks=6, block_size=2)
    for prompt in ([1, 2, 3], [6, 7, 8]):
        rig.submit(prompt, 6)
    rig.run()
    totals = rig.blocks.session.totals
    assert totals.preemptions == 1
    # The resumed request looks up its prompt and its generated tokens once more.
    admitted = [table.sequence for _, applied in rig.steps for table in applied.result.tables if table.first_index == 0]
    resumed = rig.allocates()[-1]
    assert admitted == [1, 2, resumed.sequence]
    assert totals.prefix_query_tokens == 3 + 3 + len(resumed.token_ids)
    assert rig.scheduler.totals.prompt_tokens == 6
    assert rig.scheduler.totals.cached_tokens == 0
