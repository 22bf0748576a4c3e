"""Each pool that Steps can reach is reported over the wire and adopted; acceptance has 10,000 of them."""

import pytest

from blocks import Allocate, Fork, Step
from kvmanager import Pool, PoolSpec, limits
from tests.services.wire.random_pools import RandomPool, check_reported_and_adopted

POOLS = 300


def test_random_reachable_pools_are_reported_and_adopted() -> None:
    more_sequences_than_blocks = 0
    for seed in range(POOLS):
        pool = RandomPool(seed).pool
        more_sequences_than_blocks += len(pool.sequences) > pool.spec.blocks
        check_reported_and_adopted(pool)
    assert more_sequences_than_blocks > POOLS // 20


def test_pools_at_the_limit_of_shares_are_reported_and_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SHARES", 6)
    shares = 0
    for seed in range(POOLS):
        pool = RandomPool(seed).pool
        shares = max(shares, pool.device.saved + pool.host.saved)
        check_reported_and_adopted(pool)
    assert shares == limits.MAX_SHARES


@pytest.mark.parametrize("blocks", [1, 64])
def test_a_pool_with_more_sequences_than_blocks_is_reported_and_adopted(blocks: int) -> None:
    pool = Pool(PoolSpec("engine", 1, "model", 4, blocks))
    prompt = [7] * (4 * blocks)
    forks = tuple(Fork(1, 2 + child, len(prompt)) for child in range(64))
    pool.apply(Step(1, allocates=(Allocate(1, 1, "request", b"", prompt, len(prompt)),)))
    assert pool.apply(Step(2, forks=forks)).result.refusals == ()
    check_reported_and_adopted(pool)
