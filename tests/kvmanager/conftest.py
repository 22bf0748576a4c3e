"""Builders for the tests of the KV manager."""

from array import array
from collections import deque
from dataclasses import fields, is_dataclass
from enum import Enum

import pytest

from blocks import Allocate, Commit, Condemn, CondemnReason, Extend, Fork, Free, FreeReason, Pin, Reset, Step, Unpin
from kvmanager import Pool, PoolSpec


def plain(value):
    """Return all fields of an object, private ones included, as comparable values.

    The order of dicts counts: it is the order of queues.
    """
    if isinstance(value, dict):
        return [(plain(key), plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque, array, bytearray)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value))
    if isinstance(value, (int, str, bytes, Enum)) or value is None:
        return value
    names = [field.name for field in fields(value)] if is_dataclass(value) else list(vars(value))
    return [(name, plain(getattr(value, name))) for name in names]


class Driver:
    """An engine's end of a pool: numbers the Steps and checks the invariants after each."""

    def __init__(self, device_blocks, block_size, model_fingerprint, host_blocks):
        self.pool = Pool(PoolSpec("engine", 1, model_fingerprint, block_size, device_blocks, host_blocks))
        self.device, self.host = self.pool.device, self.pool.host

    def apply(self, **items):
        applied = self.pool.apply(Step(self.pool.last_step + 1, **items))
        assert self.pool.violations() == []
        return applied

    def accept(self, **items):
        applied = self.apply(**items)
        assert applied.result.refusals == ()
        return applied

    def refuse(self, **items):
        """Apply a Step of one item, check that its refusal changes nothing, and return the reason."""
        before = self.state()
        applied = self.apply(**items)
        assert self.state() == before
        assert (applied.sealed, applied.host_sealed, applied.result.tables, applied.effects) == ([], [], (), [])
        assert (applied.result.device_to_host, applied.result.host_to_device, applied.result.copies) == ((), (), ())
        assert (applied.granted_blocks, applied.evicted_blocks) == (0, 0)
        assert (applied.hit_tokens, applied.query_tokens) == (0, 0)
        (refusal,) = applied.result.refusals
        assert refusal.position == 0
        return refusal.reason

    def allocate(self, sequence, tokens, *, group=None, salt=b"", compute=None, spare=0):
        """Allocate a sequence with room for all its tokens; its group has the same id by default."""
        compute = len(tokens) if compute is None else compute
        item = Allocate(group or sequence, sequence, f"request-{sequence}", salt, tokens, compute, spare)
        (table,) = self.accept(allocates=[item]).result.tables
        return table

    def commit(self, sequence, tokens):
        """Commit the full blocks of a sequence that are not committed yet."""
        first, size = self.pool.sequences[sequence].committed_blocks, self.pool.spec.block_size
        return self.accept(commits=[Commit(sequence, first, tokens[first * size : len(tokens) // size * size])])

    def prefill(self, sequence, tokens, **options):
        table = self.allocate(sequence, tokens, **options)
        if len(tokens) // self.pool.spec.block_size > self.pool.sequences[sequence].committed_blocks:
            self.commit(sequence, tokens)
        return table

    def cache(self, sequence, tokens, **options):
        """Prefill and free: the blocks stay cached."""
        table = self.prefill(sequence, tokens, **options)
        self.free(sequence)
        return table

    def fork(self, parent, child, length):
        return self.accept(forks=[Fork(parent, child, length)])

    def extend(self, group, rooms):
        return self.accept(extends=[Extend(group, list(rooms.items()))])

    def free(self, *sequences, reason=FreeReason.FINISHED):
        return self.accept(frees=[Free(sequence, reason) for sequence in sequences])

    def swap_out(self, *groups):
        return self.accept(swap_outs=groups)

    def swap_in(self, *groups):
        return self.accept(swap_ins=groups)

    def pin(self, pin_id, sequence, block_count):
        return self.accept(pins=[Pin(pin_id, sequence, block_count)])

    def unpin(self, *pin_ids):
        return self.accept(pins=[Unpin(pin_id) for pin_id in pin_ids])

    def reset(self):
        return self.accept(pins=[Reset()])

    def condemn(self, *blocks, sequence=0, host=False, reason=CondemnReason.HIT):
        return self.accept(condemns=[Condemn(sequence, blocks, reason, host)])

    def table(self, sequence):
        return list(self.pool.sequences[sequence].table)

    def room(self, sequence):
        return self.pool.sequences[sequence].room_tokens

    def counts(self, blocks):
        return [self.device.ref_count(block) for block in blocks]

    def keyed(self, blocks):
        return [self.device.key(block) is not None for block in blocks]

    def order(self):
        return self.device.eviction_order()

    def state(self):
        """Return the pool's state without the number of its last Step."""
        return [entry for entry in plain(self.pool) if entry[0] != "last_step"]


@pytest.fixture
def new_pool():
    """Return a factory of pools with a Driver."""

    def make(device_blocks=10, block_size=16, model_fingerprint="model", host_blocks=0):
        return Driver(device_blocks, block_size, model_fingerprint, host_blocks)

    return make


@pytest.fixture
def state_of():
    return plain
