"""A manager with a small pool, tokens and keys of its blocks, and complete runs of sliced work."""

from blocks import Allocate, block_key, root_key
from kvmanager import KVManager, PoolSpec

FIVE = [1, 2, 3, 4, 5]  # two full blocks and a tail
KEYS = [block_key(root_key("model", b""), [1, 2])]
KEYS.append(block_key(KEYS[0], [3, 4]))


def ids(first, count):
    return list(range(first, first + count))


def allocate(sequence, tokens):
    """Return an Allocate of a sequence in a group of the same id."""
    return Allocate(sequence, sequence, "r", b"", tokens, len(tokens))


def manager_with(device_blocks=12, host_blocks=6):
    """Return a manager and the session of a pool with blocks of two tokens."""
    manager = KVManager(epoch=1)
    return manager, manager.attach(PoolSpec("engine", 1, "model", 2, device_blocks, host_blocks))


def end_of(work):
    """Run all slices of a generator and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
