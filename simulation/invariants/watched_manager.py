"""The KV manager's core, and what must be true of the order of its calls."""

from collections.abc import Callable, Generator, Iterator, Set
from typing import NamedTuple

from blocks import Step
from kvmanager import KVManager, Pool, PoolSpec, Session
from kvmanager.applied import AppliedStep
from kvmanager.manager import Registration
from kvmanager.tier.tier import Tier

# A lease that ends during a handshake lasts for this time beyond the handshake.
_LONGEST_REST_OF_LEASE_SECONDS = 1.0 + 0.5
# Of a handshake with a silent engine, and the time in which what was received is adopted.
_LONGEST_HANDSHAKE_SECONDS = 60.0 + 15.0


class _Open(NamedTuple):
    """An open registration, and when it began."""

    registration: Registration
    since: float


class WatchedManager(KVManager):
    """Reports violations to a list. They are found from calls alone, by other means than the core's own checks.

    * An engine's incarnation never decreases while a newer lease or registration is open.
    * A pool is dropped only at the end of its lease or stream, and not while the latest registration of its engine is
      open and of its incarnation.
    * A pool is dropped within its lease, or a moment after the handshake in which the lease ended.
    * A handshake ends, also if its engine is silent.
    * Only the live session's block steps are applied, with rising numbers.
    * A copy of a block to which no key may lead is marked too.
    """

    def __init__(
        self, epoch: int, clock: Callable[[], float], lease_seconds: float, faults: list[str], ending: Set[int]
    ) -> None:
        """`ending` has the starts, in nanoseconds since the boot, of engines that were asked to end."""
        super().__init__(epoch)
        self._ending = ending
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._faults = faults
        self._open: dict[int, _Open] = {}
        self._live: dict[str, Session] = {}
        self._disconnected_at: dict[int, float] = {}  # by session
        self._unregistered_at: dict[str, float] = {}  # by engine
        self._last_steps: dict[int, int] = {}  # by session

    def register(self, spec: PoolSpec) -> Registration:
        """Begin an attach."""
        registration = super().register(spec)
        self._check_newest(spec, "registered")
        self._open[registration.number] = _Open(registration, self._clock())
        return registration

    def unregister(self, registration: Registration) -> None:
        """End an attach."""
        super().unregister(registration)
        self._open.pop(registration.number, None)
        self._unregistered_at[registration.spec.engine_id] = self._clock()

    def attach(self, spec: PoolSpec, pool: Pool | None = None, registration: Registration | None = None) -> Session:
        """Make the session of an attach."""
        session = super().attach(spec, pool, registration)
        self._check_newest(spec, "attached")
        self._live[spec.engine_id] = session
        self._last_steps[session.number] = session.pool.last_step
        return session

    def mark_disconnected(self, session: Session) -> None:
        """Record that a stream was lost."""
        super().mark_disconnected(session)
        self._disconnected_at[session.number] = self._clock()

    def detach(self, session: Session) -> None:
        """End a session."""
        if self._live.get(session.pool.spec.engine_id) is session:
            self._check_drop(session)
            del self._live[session.pool.spec.engine_id]
        super().detach(session)

    def applying(self, session: Session, step: Step, budget: int) -> Generator[None, None, AppliedStep]:
        """Apply a block step."""
        marked = set(_marked(session.pool.device))
        applied = yield from super().applying(session, step, budget)
        engine_id = session.pool.spec.engine_id
        for source, copy in applied.result.device_to_host if marked else ():
            if source in marked and not session.pool.host.marks.by_block[copy]:
                self._faults.append(
                    f"{engine_id}: host block {copy} is a copy of block {source}, but is not marked as it"
                )
        if self._live.get(engine_id) is not session:
            self._faults.append(f"step {step.step} of the replaced session {session.number} of {engine_id} was applied")
        if step.step <= self._last_steps[session.number]:
            self._faults.append(f"step {step.step} of {engine_id} was applied after {self._last_steps[session.number]}")
        self._last_steps[session.number] = step.step
        return applied

    def check_handshakes(self) -> None:
        """Report a handshake that is open for too long."""
        for one in self._open.values():
            if self._clock() - one.since > _LONGEST_HANDSHAKE_SECONDS:
                self._faults.append(f"the handshake of {one.registration.spec.engine_id} does not end")

    def check_leases(self) -> None:
        """Report a pool that is kept beyond its lease. Call it where nothing can run before time passes."""
        for session in self.sessions():
            since = self._disconnected_at.get(session.number)
            engine_id = session.pool.spec.engine_id
            if since is None or self._later_attach(session):
                continue
            end = max(since + self._lease_seconds, self._unregistered_at.get(engine_id, 0.0))
            if self._clock() > end + _LONGEST_REST_OF_LEASE_SECONDS:
                self._faults.append(f"the pool of {engine_id} is kept {self._clock() - since:.3f} s after its stream")

    def _check_newest(self, spec: PoolSpec, verb: str) -> None:
        newer = [
            one.registration.spec for one in self._open.values() if one.registration.spec.engine_id == spec.engine_id
        ]
        if (live := self._live.get(spec.engine_id)) is not None:
            newer.append(live.pool.spec)
        for other in newer:
            if spec.started_after_boot < other.started_after_boot:
                self._faults.append(
                    f"{spec.engine_id}: incarnation {spec.incarnation} {verb} while {other.incarnation}, which is "
                    "newer, is attaching or has a lease"
                )

    def _check_drop(self, session: Session) -> None:
        spec = session.pool.spec
        latest = self._later_attach(session)
        if latest is not None and latest.spec.started_after_boot == spec.started_after_boot:
            self._faults.append(f"the pool of {spec.engine_id} is dropped while its engine is attaching again")
        since = self._disconnected_at.get(session.number)
        if since is not None and self._clock() - since < self._lease_seconds:
            self._faults.append(
                f"the pool of {spec.engine_id} is dropped {self._clock() - since:.3f} s after its stream"
            )
        elif since is None and spec.started_after_boot not in self._ending:
            self._faults.append(f"the pool of {spec.engine_id} is dropped while its engine is attached")

    def _later_attach(self, session: Session) -> Registration | None:
        """Return the latest open registration after a session of its engine: earlier ones do not succeed any more."""
        later = [
            one.registration
            for one in self._open.values()
            if one.registration.spec.engine_id == session.pool.spec.engine_id
            and one.registration.number > session.registration
        ]
        return max(later, key=lambda one: one.number, default=None)


def _marked(tier: Tier) -> Iterator[int]:
    """Yield the blocks to which no key may lead."""
    if tier.marks.marked_count:
        yield from (block for block in range(1, tier.total + 1) if tier.marks.by_block[block])
