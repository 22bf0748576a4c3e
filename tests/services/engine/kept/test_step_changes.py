"""What a Step changes in the seals, where one Step gives a device block several contents."""

import pytest

from blocks import Allocate, Commit, Fork, Step, Trim, WindowKind, block_key, root_key
from kvmanager import AppliedStep, Pool, PoolSpec
from services.engine.kept.step_changes import BeforeStep, seal_changes

FIRST, SECOND = (1, 2), (3, 4)


@pytest.fixture
def pool() -> Pool:
    """One device block of two tokens. Group 1 (FIRST) is in a host block, group 2 (SECOND) in the device block."""
    pool = Pool(
        PoolSpec(
            engine_id="engine",
            incarnation=1,
            model_fingerprint="model",
            block_size=2,
            device_blocks=1,
            host_blocks=2,
        )
    )
    pool.apply(Step(1, allocates=[allocated(1, FIRST)]))
    pool.apply(Step(2, commits=[Commit(1, 0, FIRST)], swap_outs=[1], allocates=[allocated(2, SECOND)]))
    return pool


def allocated(number: int, token_ids: tuple[int, ...]) -> Allocate:
    return Allocate(number, number, f"r{number}", b"", token_ids, len(token_ids))


def key(token_ids: tuple[int, ...]) -> bytes:
    return block_key(root_key("model", b""), token_ids)


def applied(pool: Pool, step: Step) -> tuple[BeforeStep, AppliedStep]:
    before = BeforeStep.of(pool.state, step, 0)
    return before, pool.apply(step)


def test_a_block_that_is_committed_and_then_takes_a_swapped_one_is_sealed_with_both_keys_in_turn(pool: Pool) -> None:
    step = Step(3, commits=[Commit(2, 0, SECOND)], swap_outs=[2], swap_ins=[1])
    before, found = applied(pool, step)
    assert [(seal.block, seal.key) for seal in found.sealed] == [(1, key(SECOND)), (1, key(FIRST))]
    changes = seal_changes(pool.state, before, found)
    assert {block: sealing.key for block, sealing in changes.committed.items()} == {1: key(SECOND)}
    assert [copy.source for copy in changes.to_host] == [1]


def test_a_block_that_had_its_key_is_not_committed_by_the_key_that_it_takes_afterwards(pool: Pool) -> None:
    pool.apply(Step(3, forks=[Fork(2, 3, 2)]))
    pool.apply(Step(4, commits=[Commit(2, 0, SECOND)]))
    step = Step(5, commits=[Commit(3, 0, SECOND)], swap_outs=[2], swap_ins=[1])
    before, found = applied(pool, step)
    assert key(FIRST) in [seal.key for seal in found.sealed]
    assert seal_changes(pool.state, before, found).committed == {}


def test_blocks_that_leave_a_window_without_their_keys_are_opened() -> None:
    pool = Pool(PoolSpec("engine", 1, "model", 2, 8, windows=(WindowKind("window", tokens=3, device_blocks=8),)))
    prompt = (*range(12),)
    pool.apply(Step(1, allocates=[allocated(1, prompt)]))
    step = Step(2, commits=[Commit(1, 0, prompt)], trims=[Trim(1, 12)])
    before = [BeforeStep.of(kind, step, number) for number, kind in enumerate(pool.state.kinds)]
    found = pool.apply(step)
    kinds = zip(pool.state.kinds, before, (found, *found.windows), strict=True)
    own, window = (seal_changes(*one) for one in kinds)
    assert own.device.opened == []
    # A prompt that continues behind the last whole block of this one but one needs the block before it.
    assert sorted(window.device.opened) == [1, 2, 3, 4]
    assert {block: sealing.depth for block, sealing in window.device.sealed.items()} == {5: 4, 6: 5}
    assert window.device.released == [[5]]
