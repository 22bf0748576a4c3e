"""A manager with a small pool, and complete runs of sliced work."""

from kvmanager import KVManager, PoolSpec


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
