"""A manager with a pool of a few small blocks, and work on it that is done a slice at a time."""

from kvmanager import KVManager, PoolSpec


def manager_with(device_blocks=12, host_blocks=6):
    """A manager and the session of one pool, of blocks of two tokens."""
    manager = KVManager(epoch=1)
    return manager, manager.attach(PoolSpec("engine", 1, "model", 2, device_blocks, host_blocks))


def end_of(work):
    """Do all slices of some work, and return what it comes to."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
