"""The memory that torch allocates on the CPU."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak memory that a function allocates, in the thread that calls it."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    peak = now = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
