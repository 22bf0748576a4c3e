"""All pools, one for each attached engine, and the sessions through which they change.

A session is one Attach of an engine. Whoever attaches last owns the pool; what comes through an older session is
refused.
"""

from array import array
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import NamedTuple

from blocks import FreeReason, Step, StepItem, StepRefusal
from kvmanager.applied import AppliedStep
from kvmanager.errors import SessionReplaced, StaleIncarnation, StepOutOfOrder, UnknownPool
from kvmanager.history.ledger import Ledger
from kvmanager.lookup import PrefixHolding, look_up
from kvmanager.observe.audit import Audit, Violation
from kvmanager.observe.block_map import BlockMap
from kvmanager.pool import Pool
from kvmanager.pool_spec import PoolSpec, truncated

_NAMED_ENGINES = 10


@dataclass
class PoolTotals:
    """What has happened in a pool since it was attached. Counted from Steps, results and audits, outside the pool."""

    steps: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    granted_blocks: int = 0
    evicted_blocks: int = 0
    copied_blocks: int = 0
    refusals: Counter[StepRefusal] = field(default_factory=Counter)
    preemptions: int = 0
    to_host_blocks: int = 0
    to_device_blocks: int = 0
    peak_held_blocks: int = 0
    peak_saved_blocks: int = 0
    audits: int = 0
    audit_violations: int = 0

    def add(self, step: Step, applied: AppliedStep, saved_blocks: int) -> None:
        """Count one Step."""
        result = applied.result
        self.steps += 1
        self.prefix_query_tokens += applied.query_tokens
        self.prefix_hit_tokens += applied.hit_tokens
        self.granted_blocks += applied.granted_blocks
        self.evicted_blocks += applied.evicted_blocks
        self.copied_blocks += len(result.copies)
        self.to_host_blocks += len(result.device_to_host)
        self.to_device_blocks += len(result.host_to_device)
        if result.refusals:
            self.refusals.update(refusal.reason for refusal in result.refusals)
        if step.frees:
            refused = result.refused
            self.preemptions += sum(
                free.reason is FreeReason.PREEMPTED and (StepItem.FREE, position) not in refused
                for position, free in enumerate(step.frees)
            )
        self.peak_held_blocks = max(self.peak_held_blocks, applied.device.held)
        self.peak_saved_blocks = max(self.peak_saved_blocks, saved_blocks)


@dataclass(eq=False)
class Session:
    """One Attach: the pool it made or adopted, and its totals.

    `connected` is false from the moment when its stream broke: the pool is kept for a while, for others to see. While
    it is `stepping`, a Step is half applied: nothing but the rest of it may change the pool.
    """

    number: int
    pool: Pool
    totals: PoolTotals
    registration: int = 0
    connected: bool = True
    audits: list[Audit] = field(default_factory=list)  # those under way
    maps: list[BlockMap] = field(default_factory=list)  # those that somebody looks at

    @property
    def stepping(self) -> bool:
        """Whether it is between two slices of a Step."""
        return self.pool.state.stepping

    @stepping.setter
    def stepping(self, stepping: bool) -> None:
        self.pool.state.stepping = stepping


class Registration(NamedTuple):
    """An attach that is under way: what the engine says of its pool, and which registration of all engines it is."""

    spec: PoolSpec
    number: int


class KVManager:
    """Owns every pool. Synchronous and without locks: all calls come from one thread of control."""

    def __init__(self, epoch: int, ledger: Ledger | None = None) -> None:
        """Begin without pools. `epoch` is random, drawn anew by each process, and compared for equality only.

        All that happens is recorded in `ledger`, by default one of the usual size.
        """
        self.epoch = epoch
        self.ledger = ledger or Ledger()
        self._sessions: dict[str, Session] = {}
        self._last_session = 0
        self._last_registration = 0
        self._registered: dict[str, int] = {}  # the last registration of engines that attach

    def register(self, spec: PoolSpec) -> Registration:
        """Note that an engine begins to attach: of its attaches, the last to register gets the engine.

        It ends with `attach` or `unregister`. Raises StaleIncarnation as `check` does.
        """
        self.check(spec)
        self._last_registration += 1
        self._registered[spec.engine_id] = self._last_registration
        return Registration(spec, self._last_registration)

    def check_latest(self, registration: Registration) -> None:
        """Raise SessionReplaced where the engine has registered again since, and StaleIncarnation as `check` does."""
        self.check(registration.spec)
        engine_id = registration.spec.engine_id
        live = self._sessions.get(engine_id)
        last = max(self._registered.get(engine_id, 0), live.registration if live else 0)
        if last > registration.number:
            raise SessionReplaced(f"engine {engine_id} has registered again while this attach was under way")

    def unregister(self, registration: Registration) -> None:
        """Forget a registration whose attach ended, one way or the other."""
        if self._registered.get(registration.spec.engine_id) == registration.number:
            del self._registered[registration.spec.engine_id]

    def check(self, spec: PoolSpec) -> None:
        """Raise StaleIncarnation while a newer incarnation of the engine is attached, or was until lately."""
        current = self._sessions.get(spec.engine_id)
        if current and current.pool.spec.incarnation > spec.incarnation:
            raise StaleIncarnation(
                f"engine {spec.engine_id}: incarnation {spec.incarnation} is older than the attached "
                f"{current.pool.spec.incarnation}"
            )

    def attach(self, spec: PoolSpec, pool: Pool | None = None, registration: Registration | None = None) -> Session:
        """Begin a session with an adopted pool, or an empty one, replacing any older session of the engine.

        The totals of the same incarnation go on. Without a `registration` it registers now. Raises StaleIncarnation,
        and SessionReplaced where the engine has registered again since.
        """
        registration = registration or self.register(spec)
        self.check_latest(registration)
        self.unregister(registration)
        current = self._sessions.get(spec.engine_id)
        same_life = current is not None and current.pool.spec.incarnation == spec.incarnation
        self._last_session += 1
        session = Session(
            self._last_session,
            pool or Pool(spec),
            current.totals if current and same_life else PoolTotals(),
            registration.number,
        )
        self._sessions[spec.engine_id] = session
        self.ledger.attached(spec.engine_id, session.pool.sequences.values())
        return session

    def apply(self, session: Session, step: Step) -> AppliedStep:
        """Apply a Step of a session. Raises SessionReplaced, and does nothing, when a newer session has the engine."""
        self._check_live(session)
        applied = session.pool.apply(step)
        self.ledger.record(session.pool.spec.engine_id, step, applied)
        self._count(session, step, applied)
        return applied

    def applying(self, session: Session, step: Step, budget: int) -> Generator[None, None, AppliedStep]:
        """Apply a Step as `apply` does, in slices of `budget` units of work; see `Pool.applying`.

        It has to be run to its end, which comes with SessionReplaced where the session ended between two slices: what
        was done of the Step ends with the pool then. Audits pause meanwhile; ledger, totals and maps follow at the end.
        """
        self._check_live(session)
        assert not session.stepping, "a session's Steps are applied one after the other"
        work = session.pool.applying(step, budget)
        session.stepping = True
        while True:
            try:
                next(work)
            except StopIteration as end:
                applied: AppliedStep = end.value
                break
            except StepOutOfOrder:
                session.stepping = False
                raise
            yield
            self._check_live(session)
        for _ in self.ledger.recording(session.pool.spec.engine_id, step, applied):
            yield
            self._check_live(session)
        session.stepping = False
        self._count(session, step, applied)
        return applied

    def _check_live(self, session: Session) -> None:
        if self._sessions.get(session.pool.spec.engine_id) is not session:
            session.stepping = False
            raise SessionReplaced(f"session {session.number} of engine {session.pool.spec.engine_id} was replaced")

    def _count(self, session: Session, step: Step, applied: AppliedStep) -> None:
        session.totals.add(step, applied, session.pool.device.saved)
        for audit in session.audits:
            audit.on_step(applied)
        for one in session.maps:
            one.on_step(applied)

    def mark_disconnected(self, session: Session) -> None:
        """Note that a session's stream broke; its pool is kept until it is dropped by `detach` or replaced."""
        session.connected = False

    def detach(self, session: Session) -> None:
        """End a session and drop its pool; a session that was replaced has none to drop."""
        if self._sessions.get(session.pool.spec.engine_id) is session:
            del self._sessions[session.pool.spec.engine_id]
            self.ledger.detached(session.pool.spec.engine_id)

    def sessions(self) -> list[Session]:
        """Return the live sessions, in order of their engines' ids."""
        return [self._sessions[engine_id] for engine_id in sorted(self._sessions)]

    def find_session(self, engine_id: str) -> Session | None:
        """Return an engine's session, None while it has none."""
        return self._sessions.get(engine_id)

    def session(self, engine_id: str) -> Session:
        """Return an engine's session; an empty id means the only one. Raises UnknownPool."""
        if not engine_id and len(self._sessions) == 1:
            return next(iter(self._sessions.values()))
        if engine_id not in self._sessions:
            attached = ", ".join(sorted(self._sessions)[:_NAMED_ENGINES]) or "none"
            raise UnknownPool(f"no engine {truncated(engine_id)!r} is attached (attached: {attached})")
        return self._sessions[engine_id]

    def audit(self, session: Session) -> Generator[list[Violation]]:
        """Check the books of a session's pool once, in slices; each gives what it found. It ends with the session.

        Steps may be applied between the slices; while one is half applied, slices are empty. A fault is reported once
        for each audit and place where it shows, and the block that is to blame is withheld.
        """
        audit = Audit(session.pool.state)
        session.audits.append(audit)
        try:
            slices = audit.slices()
            while True:
                while session.stepping:
                    yield []
                    if not self.is_live(session):
                        return
                found = next(slices, None)
                if found is None:
                    break
                session.totals.audit_violations += len(found)
                self._record_withheld(session, found)
                yield found
                if not self.is_live(session):
                    return
            session.totals.audits += 1
        finally:
            session.audits.remove(audit)

    def _record_withheld(self, session: Session, found: list[Violation]) -> None:
        for host in (False, True):
            blocks = {violation.block for violation in found if violation.block and violation.host == host}
            if blocks:
                self.ledger.withheld(session.pool.spec.engine_id, sorted(blocks), host=host)

    def open_map(self, session: Session) -> BlockMap:
        """Return a map of a session's pool that follows its Steps until `close_map`; build it with `building`."""
        session.maps.append(BlockMap(session.pool.state))
        return session.maps[-1]

    def close_map(self, session: Session, block_map: BlockMap) -> None:
        """Let a map follow its pool no longer. What the audit withheld between Steps it has to be told: see `touch`."""
        session.maps.remove(block_map)

    def is_live(self, session: Session) -> bool:
        """Return whether the session has its engine's pool: it has not ended, and none has replaced it."""
        return self._sessions.get(session.pool.spec.engine_id) is session

    def lookup(
        self, token_ids: "array[int]", salt: bytes = b"", model_fingerprint: str = ""
    ) -> Generator[None, None, list[PrefixHolding]]:
        """Look up, in slices, what each pool holds of a prompt's beginning; the generator's return value is the answer.

        Pools of other fingerprints are left out unless `model_fingerprint` is empty. Pools stand in order of their
        engines' ids; one whose stream broke is among them while its lease lives, one dropped meanwhile is not.
        """
        sessions = [
            session for session in self.sessions() if model_fingerprint in ("", session.pool.spec.model_fingerprint)
        ]
        holdings = yield from look_up([session.pool.state for session in sessions], token_ids, salt)
        return [holding for session, holding in zip(sessions, holdings, strict=True) if self.is_live(session)]
