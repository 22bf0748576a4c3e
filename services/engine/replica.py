"""The engine's replica of its pool: the KV manager's own core, which applies each answered block step.

The same block steps produce the same pool, so the replica can describe the pool to a manager that lost it. It belongs
to the event loop, like the stream. If the manager's answer differs, the replica is right: its answer goes to the
engine, and its report to the manager.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import replace

import kvmanager
from blocks import Step, StepResult
from engine.kept.seal_writer import SealChanges
from kvmanager.parts import complete
from services.engine.events.pool_events import Follow
from services.engine.kept.origin_rows import OriginRows
from services.engine.kept.step_changes import BeforeStep, seal_changes

# Units of work of a block step that are done without a pause: about half a millisecond.
_SLICE_WORK = 1000
_UNLIMITED = 1 << 62


class PoolDiverged(Exception):
    """The KV manager's answer differs from the replica's. `own` is the replica's answer."""

    def __init__(self, own: StepResult) -> None:
        super().__init__(f"the KV manager's answer to step {own.step} differs from the engine's replica")
        self.own = own


class Replica:
    """The state of a pool at its engine, and the block steps in flight."""

    def __init__(
        self,
        spec: kvmanager.PoolSpec,
        kept: kvmanager.PoolReport | None = None,
        *,
        seals: bool = False,
        follow: Follow | None = None,
        rows: OriginRows | None = None,
    ) -> None:
        """Start with an empty pool, or with what a kept memory reports. If `seals`, the changes of seals are recorded.

        `follow` is called with the pool, and returns what receives its block steps. If there are seals and a follower,
        `rows` get what the keys of blocks are hashes of. Raises InvalidReport if the memory contradicts itself.
        """
        self.spec = spec
        self.adopted = kept is not None and not kept.empty
        self.pool = complete(kvmanager.adopt(spec, kept)) if kept else kvmanager.Pool(spec)
        self._seals = seals
        self._changes: list[SealChanges] = []
        self._in_flight: deque[Step] = deque()
        self._follower = follow(self.pool.state) if follow else None
        self._rows = rows

    @property
    def steps_in_flight(self) -> int:
        """Number of block steps that were sent and not answered."""
        return len(self._in_flight)

    @property
    def available_blocks(self) -> int:
        """Number of available device blocks."""
        return self.pool.device.available

    @property
    def available_host_blocks(self) -> int:
        """Number of available host blocks."""
        return self.pool.host.available

    @property
    def available_in_windows(self) -> list[tuple[int, int]]:
        """Number of available blocks of both tiers of each window kind."""
        return [(window.device.available, window.host.available) for window in self.pool.windows]

    @property
    def pins(self) -> frozenset[str]:
        """Pins that hold blocks."""
        return frozenset(self.pool.state.pins)

    def add_in_flight(self, step: Step) -> None:
        """Record a block step that was sent."""
        self._in_flight.append(step)

    def apply_result(self, result: StepResult) -> None:
        """Apply the oldest block step in flight. Raises PoolDiverged if the result differs from the KV manager's."""
        for kind, one in enumerate((result, *result.windows)):
            self.pool.withhold(one.withheld_blocks, one.host_withheld_blocks, kind)
        step = self._in_flight.popleft()
        whole = self._seals or self._follower
        own = (complete(self._applying(step, _UNLIMITED)) if whole else self.pool.apply(step)).result
        if self._follower:
            self._follower.publish()
        if _compared(own) != _compared(result):
            raise PoolDiverged(own)

    @property
    def has_changes(self) -> bool:
        """Whether changes of seals were not taken."""
        return bool(self._changes)

    def take_changes(self) -> list[SealChanges]:
        """Return the changes of seals since the last call, in order; none without seals."""
        changes, self._changes = self._changes, []
        return changes

    def _applying(self, step: Step, budget: int) -> Generator[None, None, kvmanager.AppliedStep]:
        kinds = self.pool.state.kinds if self._seals else ()
        before = [BeforeStep.of(kind, step, number) for number, kind in enumerate(kinds)]
        if self._follower:
            self._follower.before(step)
        applied = yield from self.pool.applying(step, budget)
        if self._follower:
            self._follower.applied(step, applied.result.refusals)
        if kinds:
            own = zip(kinds, before, (applied, *applied.windows), strict=True)
            changes, *windows = [seal_changes(*one) for one in own]
            self._changes.append(changes._replace(windows=windows))
            if self._rows and self._follower:
                self._rows.record(self._changes[-1], kinds, self._follower.announcements.fields)
        return applied

    def report(self) -> kvmanager.PoolReport:
        """Describe the pool, as `reporting` does, in one piece."""
        return complete(self.reporting())

    def reporting(self) -> Generator[None, None, kvmanager.PoolReport]:
        """Describe the pool after a disconnect, in slices, when the block steps in flight will not be answered.

        Frees, forks and commits in flight take effect, whether or not the manager received them. Allocations are not
        granted, and swaps do not happen, because nobody made the copies.
        """
        while self._in_flight:
            step = self._in_flight.popleft()
            yield from self._applying(replace(step, swap_outs=(), swap_ins=(), extends=(), allocates=()), _SLICE_WORK)
        if not (self.pool.last_step or self.adopted):
            return kvmanager.PoolReport()
        return (yield from kvmanager.reporting(self.pool))


def _compared(result: StepResult) -> tuple[object, ...]:
    tables = [(change.sequence, list(change.block_ids)) for change in result.tables]
    windows = [_compared(window) for window in result.windows]
    return result.step, result.available_blocks, result.available_host_blocks, tables, windows
