"""Reports of 10,000 random reachable pools are adopted, as `make test` checks for some hundred."""

import pytest

from tests.acceptance.conftest import Record
from tests.services.wire.random_pools import RandomPool, check_reported_and_adopted

POOLS = 10_000


@pytest.mark.timeout(1800)
def test_10000_random_reachable_pools_are_reported_and_adopted(record: Record) -> None:
    sequences = [0, 0]  # at most as many as blocks, and more
    for seed in range(1_000_000, 1_000_000 + POOLS):
        pool = RandomPool(seed).pool
        sequences[len(pool.sequences) > pool.spec.blocks] += 1
        check_reported_and_adopted(pool)
    record(pools=POOLS, more_sequences_than_blocks=sequences[1])
