"""All pools, one for each attached engine, and the sessions through which they change.

A session is one Attach of an engine. The latest session owns the pool; block steps of older sessions are refused.
"""

from array import array
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from blocks import CondemnReason, FreeReason, Step, StepItem, StepRefusal
from kvmanager import limits
from kvmanager.applied import AppliedStep
from kvmanager.effects import condemned_in
from kvmanager.errors import (
    InvalidRegistration,
    SessionReplaced,
    StaleIncarnation,
    TooManyBlocks,
    UnknownPool,
    UnknownRequest,
)
from kvmanager.history.ledger import Ledger
from kvmanager.lookup import PrefixHolding, lookup_prefix
from kvmanager.observe.audit import Audit, Violation
from kvmanager.observe.block_map import PoolMap
from kvmanager.pool import Pool
from kvmanager.pool_spec import PoolSpec, truncated

_MAX_LISTED_ENGINES = 10


@dataclass
class PoolTotals:
    """Totals of a pool since its engine attached, counted from block steps, results and audits.

    `condemned_blocks` counts those of all kinds, by the tier, True for the host tier, and the reason.
    """

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
    condemned_blocks: Counter[tuple[bool, CondemnReason]] = field(default_factory=Counter)

    def add(self, step: Step, applied: AppliedStep, saved_blocks: int) -> None:
        """Count one block step."""
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
        for kind in (applied, *applied.windows) if step.condemns else ():
            for condemned in condemned_in(kind.effects):
                self.condemned_blocks[condemned.host, condemned.reason] += len(condemned.blocks)
        self.peak_held_blocks = max(self.peak_held_blocks, applied.device.held)
        self.peak_saved_blocks = max(self.peak_saved_blocks, saved_blocks)


@dataclass(eq=False)
class Session:
    """One Attach: its created or adopted pool, and the totals.

    `connected` becomes False when the stream is lost; the pool is kept until the lease expires. While the session is
    `stepping`, a block step is partially applied, and only its remaining slices may change the pool.
    """

    number: int
    pool: Pool
    totals: PoolTotals
    registration: int = 0
    connected: bool = True
    audits: list[Audit] = field(default_factory=list)  # in progress
    maps: list[PoolMap] = field(default_factory=list)  # open

    @property
    def stepping(self) -> bool:
        """Whether a block step is partially applied."""
        return self.pool.state.stepping

    @stepping.setter
    def stepping(self, stepping: bool) -> None:
        for kind in self.pool.state.kinds:
            kind.stepping = stepping


class Registration(NamedTuple):
    """An attach in progress: the properties of its pool, and a number that increases with every registration."""

    spec: PoolSpec
    number: int


class KVManager:
    """Owns every pool. Synchronous and without locks: all calls must come from one thread."""

    def __init__(self, epoch: int, ledger: Ledger | None = None, max_blocks: int = limits.MAX_BLOCKS) -> None:
        """Start without pools. `epoch` is a random number of this process, which is only compared for equality.

        Events are recorded in `ledger`, or in a new one of the default size. All pools together may have `max_blocks`.
        """
        self.epoch = epoch
        self.ledger = ledger or Ledger()
        self.max_blocks = max_blocks
        self._sessions: dict[str, Session] = {}
        self._last_session = 0
        self._last_registration = 0
        # Of each engine that is attaching: none older than the one before it, which may succeed if the latest fails.
        self._registered: dict[str, list[Registration]] = {}

    def register(self, spec: PoolSpec) -> Registration:
        """Begin an attach. Of concurrent attaches of an engine, the latest of its newest incarnation succeeds.

        The registration ends with `attach` or `unregister`. Raises StaleIncarnation as `check_incarnation` does, also
        if a newer incarnation is attaching; InvalidRegistration and TooManyBlocks if the pool is too large.
        """
        self.check_incarnation(spec)
        if attaching := self._latest(spec.engine_id):
            _check_not_older(spec, attaching.spec, "attaching")
        self._check_blocks(spec)
        self._last_registration += 1
        registration = Registration(spec, self._last_registration)
        self._registered.setdefault(spec.engine_id, []).append(registration)
        return registration

    def _latest(self, engine_id: str) -> Registration | None:
        """Return the latest open registration of an engine."""
        registered = self._registered.get(engine_id)
        return registered[-1] if registered else None

    def _check_blocks(self, spec: PoolSpec) -> None:
        if spec.blocks > self.max_blocks:
            raise InvalidRegistration(
                spec.largest_tier,
                f"must be less: the pool has {spec.blocks} blocks, and at most {self.max_blocks} are allowed "
                "(max_blocks)",
            )
        specs = {one: session.pool.spec for one, session in self._sessions.items()}
        specs |= {one: registered[-1].spec for one, registered in self._registered.items()}
        others = sum(one.blocks for engine_id, one in specs.items() if engine_id != spec.engine_id)
        if others + spec.blocks > self.max_blocks:
            raise TooManyBlocks(
                f"device_blocks and host_blocks: the pool would have {spec.blocks} blocks, and {others} of at most "
                f"{self.max_blocks} (max_blocks) are in use"
            )

    def check_latest(self, registration: Registration) -> None:
        """Raise SessionReplaced if the engine has registered again, StaleIncarnation as `check_incarnation` does."""
        self.check_incarnation(registration.spec)
        engine_id = registration.spec.engine_id
        live = self._sessions.get(engine_id)
        latest = self._latest(engine_id)
        last = max(latest.number if latest else 0, live.registration if live else 0)
        if last > registration.number:
            raise SessionReplaced(f"engine {engine_id} has registered again during this attach")

    def unregister(self, registration: Registration) -> None:
        """End a registration, after its attach has succeeded or failed."""
        registered = self._registered.get(registration.spec.engine_id, [])
        if registration in registered:
            registered.remove(registration)
        if not registered:
            self._registered.pop(registration.spec.engine_id, None)

    def is_attaching(self, session: Session) -> bool:
        """Return whether the incarnation of a session is attaching again. Earlier attaches do not succeed any more."""
        latest = self._latest(session.pool.spec.engine_id)
        if latest is None or latest.number < session.registration:
            return False
        return latest.spec.incarnation == session.pool.spec.incarnation

    def check_incarnation(self, spec: PoolSpec) -> None:
        """Raise StaleIncarnation if a newer incarnation of the engine has a session."""
        current = self._sessions.get(spec.engine_id)
        if current:
            _check_not_older(spec, current.pool.spec, "attached")

    def attach(self, spec: PoolSpec, pool: Pool | None = None, registration: Registration | None = None) -> Session:
        """Begin a session with an adopted or an empty pool, replacing the engine's older session.

        A session of the same incarnation continues its totals. Without `registration`, the engine is registered now.
        Raises StaleIncarnation, and SessionReplaced if the engine has registered again.
        """
        registration = registration or self.register(spec)
        self.check_latest(registration)
        self.unregister(registration)
        current = self._sessions.get(spec.engine_id)
        same_incarnation = current is not None and current.pool.spec.incarnation == spec.incarnation
        self._last_session += 1
        session = Session(
            self._last_session,
            pool or Pool(spec),
            current.totals if current and same_incarnation else PoolTotals(),
            registration.number,
        )
        self._sessions[spec.engine_id] = session
        windows = [one.name for one in spec.windows]
        self.ledger.attached(spec.engine_id, session.pool.sequences.values(), windows, spec.block_size)
        return session

    def apply(self, session: Session, step: Step) -> AppliedStep:
        """Apply a block step of a session. Raises SessionReplaced, changing nothing, if the session is not live."""
        self.check_live(session)
        applied = session.pool.apply(step)
        self.ledger.record(session.pool.spec.engine_id, step, applied)
        self._count(session, step, applied)
        return applied

    def applying(self, session: Session, step: Step, budget: int) -> Generator[None, None, AppliedStep]:
        """Apply a block step as `apply` does, in slices of `budget` units of work; see `Pool.applying`.

        The generator must be run to its end. It raises SessionReplaced if the session ends between two slices. Audits
        pause until the end; the ledger, totals and maps are updated at the end.
        """
        self.check_live(session)
        assert not session.stepping, "the block steps of a session are applied one at a time"
        work = session.pool.applying(step, budget)
        session.stepping = True
        while True:
            try:
                next(work)
            except StopIteration as end:
                applied: AppliedStep = end.value
                break
            except Exception:
                # Also after a fault of the core, whose damage audits must be able to find.
                session.stepping = False
                raise
            yield
            self.check_live(session)
        for _ in self.ledger.recording(session.pool.spec.engine_id, step, applied):
            yield
            self.check_live(session)
        session.stepping = False
        self._count(session, step, applied)
        return applied

    def check_live(self, session: Session) -> None:
        """Raise SessionReplaced if the session has ended or was replaced."""
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
        """Record that a session's stream was lost; the pool is kept until `detach` or a newer session."""
        session.connected = False

    def detach(self, session: Session) -> None:
        """End a session and drop its pool. Does nothing if the session was replaced."""
        if self._sessions.get(session.pool.spec.engine_id) is session:
            del self._sessions[session.pool.spec.engine_id]
            self.ledger.detached(session.pool.spec.engine_id)

    def sessions(self) -> list[Session]:
        """Return the live sessions, in order of their engines' ids."""
        return [self._sessions[engine_id] for engine_id in sorted(self._sessions)]

    def find_session(self, engine_id: str) -> Session | None:
        """Return an engine's session, None if it has none."""
        return self._sessions.get(engine_id)

    def session(self, engine_id: str) -> Session:
        """Return an engine's session; an empty id selects the only one. Raises UnknownPool."""
        if not engine_id and len(self._sessions) == 1:
            return next(iter(self._sessions.values()))
        if engine_id not in self._sessions:
            attached = ", ".join(sorted(self._sessions)[:_MAX_LISTED_ENGINES]) or "none"
            raise UnknownPool(f"engine {truncated(engine_id)!r} is not attached (attached: {attached})")
        return self._sessions[engine_id]

    def finding_request(
        self, request_id: str, engine_id: str = "", group: int = 0
    ) -> Generator[None, None, tuple[Session, int]]:
        """Find, in slices, the pool that holds a request's blocks, and the request's group there.

        The group of an engine is looked at first; without it, this takes time by the number of live groups. The
        generator raises UnknownRequest.
        """
        known = self._sessions.get(engine_id)
        if known and known.pool.is_of(group, request_id):
            return known, group
        for session in self.sessions():
            found = yield from session.pool.finding_group(request_id)
            if found is not None:
                return session, found
        raise UnknownRequest(f"request {truncated(request_id)!r} holds no blocks")

    def audit(self, session: Session) -> Generator[list[Violation]]:
        """Audit a session's pool once, in slices; each yields the violations found. Ends when the session ends.

        Block steps may be applied between the slices; while a block step is partially applied, slices are empty. An
        audit reports each violation once, and withholds the faulty block.
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
        for kind, host in product(range(len(session.pool.state.kinds)), (False, True)):
            blocks = {one.block for one in found if one.block and (one.kind, one.host) == (kind, host)}
            if blocks:
                self.ledger.withheld(session.pool.spec.engine_id, sorted(blocks), host=host, kind=kind)

    def open_map(self, session: Session) -> PoolMap:
        """Return a map of a session's pool that follows its block steps until `close_map`. `PoolMap.building` fills it.

        Blocks that the audit withholds between block steps must be reported to the map of their kind by
        `BlockMap.touch`.
        """
        session.maps.append(PoolMap(session.pool.state))
        return session.maps[-1]

    def close_map(self, session: Session, pool_map: PoolMap) -> None:
        """Stop updating a map."""
        session.maps.remove(pool_map)

    def is_live(self, session: Session) -> bool:
        """Return whether the session has neither ended nor been replaced."""
        return self._sessions.get(session.pool.spec.engine_id) is session

    def lookup(
        self, token_ids: "array[int]", salt: bytes = b"", model_fingerprint: str = ""
    ) -> Generator[None, None, list[PrefixHolding]]:
        """Find the cached prefix of a prompt in each pool, in slices; the return value is in order of engine ids.

        If `model_fingerprint` is not empty, only pools with this fingerprint are searched. The result includes pools of
        disconnected engines until their leases expire, but no pools dropped during the lookup.
        """
        sessions = [
            session for session in self.sessions() if model_fingerprint in ("", session.pool.spec.model_fingerprint)
        ]
        holdings = yield from lookup_prefix([session.pool.state for session in sessions], token_ids, salt)
        return [holding for session, holding in zip(sessions, holdings, strict=True) if self.is_live(session)]


def _check_not_older(spec: PoolSpec, other: PoolSpec, state: str) -> None:
    if spec.precedes(other):
        raise StaleIncarnation(
            f"engine {spec.engine_id}: incarnation {spec.incarnation} is older than the {state} {other.incarnation}; "
            "each engine needs an id of its own"
        )
