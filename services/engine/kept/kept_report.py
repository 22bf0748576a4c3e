"""The report of a pool that a kept memory describes: cached and withheld blocks, no sequences and no pins."""

from engine.kept.kept_memory import KeptMemory, KindMemory
from engine.kept.seals import Seals
from kvmanager import PoolReport, TierReport


def kept_report(memory: KeptMemory) -> PoolReport:
    """Describe what a memory contains. What was open or held by a sequence that ended with its engine is free."""
    resets = memory.counters.resets
    report, *windows = [_kind(kind, resets) for kind in memory.kinds]
    report.windows = windows
    return report


def _kind(kind: KindMemory, resets: int) -> PoolReport:
    return PoolReport(device=_tier(kind.device, resets), host=_tier(kind.host, resets), resets=resets)


def _tier(seals: Seals, resets: int) -> TierReport:
    cached, withheld = seals.cached(resets), seals.withheld()
    taken = {*cached, *withheld}
    free = [block for block in range(1, len(seals) + 1) if block not in taken]
    return TierReport(keyed=cached, release_order=[*free, *cached], withheld=withheld, outlived=[*cached])
