"""When Steps are sent while requests decode."""

import pytest

from tests.engine.schedule.test_scheduler import BLOCK, Rig

MANY_BLOCKS = 64


@pytest.fixture
def rig() -> Rig:
    rig = Rig(MANY_BLOCKS)
    rig.turn_seconds = 0.01
    return rig


def decode(rig: Rig, turns: int) -> None:
    """Run turns, and keep only their Steps."""
    rig.steps.clear()
    for _ in range(turns):
        rig.turn()


def test_lengths_wait_for_a_step_with_other_items(rig: Rig) -> None:
    rig.submit([1, 2], 24)
    decode(rig, 4)
    decode(rig, 4 * BLOCK)
    assert len(rig.steps) == 4, "one for each block"
    for step in rig.steps:
        assert step.extends
        (length,) = step.lengths
        assert rig.blocks.pool.sequences[length[0]].computed_tokens >= length[1]


def test_lengths_alone_wait_at_most_a_second(rig: Rig) -> None:
    rig.submit([1, 2], 24)
    decode(rig, 4)
    rig.turn_seconds = 1.0
    decode(rig, BLOCK)
    assert [len(step.lengths) for step in rig.steps] == [1] * BLOCK
    assert not all(step.extends or step.commits for step in rig.steps)


def test_keys_of_a_prompt_do_not_wait(rig: Rig) -> None:
    rig.submit(range(1, 2 * BLOCK + 1), 12)
    decode(rig, 4)
    (first, *_) = (step for step in rig.steps if step.commits)
    assert [len(commit.token_ids) for commit in first.commits] == [2 * BLOCK]
    assert not first.extends, "it was sent for the keys"


def test_keys_of_generated_tokens_are_sent_at_the_end(rig: Rig) -> None:
    name = rig.submit([1, 2], 2 * BLOCK)
    rig.run()
    written = 2 + len(rig.tokens[name]) - 1  # the last token is never fed back
    committed = sum(len(commit.token_ids) for step in rig.steps for commit in step.commits)
    assert committed == written // BLOCK * BLOCK


def test_one_step_extends_several_sequences_of_a_roomy_pool(rig: Rig) -> None:
    for length in (1, 2):
        rig.submit(range(1, length + 1), 24)
    decode(rig, 5)
    decode(rig, 2 * BLOCK)
    assert {len(step.extends) for step in rig.steps} == {2}
