"""The Steps of a decoding batch."""

from itertools import islice

from bench.loads.decoding_batch import BLOCK_SIZE, DecodingBatch
from kvmanager import KVManager, PoolSpec


def test_endless_steps_are_applied_without_refusals_and_start_again_with_an_empty_pool() -> None:
    manager = KVManager(1)
    session = manager.attach(PoolSpec("engine", 1, "model", BLOCK_SIZE, 600))
    begun = 0
    for step in islice(DecodingBatch(2).endless_steps(), 9_000):
        assert not manager.apply(session, step).result.refusals
        begun += bool(step.allocates)
        assert session.pool.device.available == 600 or session.pool.sequences
    assert begun == 3
