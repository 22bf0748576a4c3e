"""The simulated engine: the product's services, scheduler and loop over a model of digests."""

import math
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from random import Random

from engine.kept.kept_memory import KeptMemory
from engine.kept.seal_writer import SealWriter
from engine.run.loop import Engine
from engine.schedule.scheduler import Scheduler
from kvmanager import PoolState
from quire.v1 import engine_pb2, engine_pb2_grpc
from services.engine.block_client import SealedBlocks
from services.engine.driver import EngineDriver, Pause
from services.engine.guided.constraints import Constraints
from services.engine.kept.keeping import SealingRunner
from services.engine.observer import EngineObserver
from services.engine.recording import RequestsRecorder
from services.engine.request_reports import RequestReports
from services.engine.server import finish
from services.engine.servicer import EngineServicer
from services.engine.startup.tokenizer_files import TokenizerFiles
from services.runtime.tracing.spans import Tracing
from services.wire.features import FEATURES
from simulation.invariants.service_order import ServiceOrder
from simulation.invariants.violation import Violation
from simulation.invariants.watched_proof import WatchedProof
from simulation.network.connections import Network
from simulation.network.server import SimulatedServer
from simulation.processes.attached import FINGERPRINT, MODEL, VOCABULARY, AttachedProcess, EngineSize, Incarnation
from simulation.processes.kept import SharedMemory
from simulation.runner import DigestRunner

STOP = frozenset({0})

_SECONDS_WITHOUT_MANAGER = 10.0
_HEARTBEAT_SECONDS = 1.0


class EngineProcess(AttachedProcess):
    """An engine whose model computes tokens from the contents of its blocks. Its thread runs turn by turn."""

    def __init__(
        self,
        network: Network,
        clock: Callable[[], float],
        engine_id: str,
        incarnation: Incarnation,
        size: EngineSize,
        folder: Path,
        shared: SharedMemory | None = None,
    ) -> None:
        """Start an engine, whose tokenizer is in `folder`, on the memory that its predecessor left."""
        super().__init__(network, clock, engine_id, incarnation, size, shared, compares=size.compares)
        self.pause: Pause | None = None  # of the thread, which sleeps
        self._until: float | None = None
        self._computes_until = -math.inf
        self._thread_ended = False
        self.runner = DigestRunner(size.capacity(), shared.kinds if shared else ())
        self.memory = self.runner.memory
        self.scheduler = Scheduler(
            size.capacity(),
            size.limits,
            ahead=size.plans_ahead,
            withheld=self._kept.withheld if self._kept else ((),),
        )
        self.proof = self._make_proof()
        self._order = ServiceOrder(self.scheduler, self.loop.failures, self.proof)
        self._checked_plans = 0
        self.loop.run(partial(self._open, folder))

    @property
    def computes(self) -> bool:
        """Whether its thread is in a step."""
        return self._clock() < self._computes_until

    @property
    def request_ids(self) -> Collection[str]:
        """The ids of its live requests."""
        return self.scheduler._queue.by_request.keys()  # which the scheduler shows nobody

    def thread_can_run(self, now: float) -> bool:
        """Return whether the engine's thread can begin a turn."""
        if self._thread_ended or now < self._computes_until:
            return False
        if self.pause is None or self.driver.has_commands:
            return True
        return self._until is not None and self._until <= now

    def thread_wakes_at(self) -> float | None:
        """Return the time at which the thread's step or pause ends."""
        if self._thread_ended:
            return None
        if self.computes:
            return self._computes_until
        return self._until if self.pause is not None else None

    def run_thread(self) -> None:
        """Run a turn, or end the thread."""
        if self.driver.stopping:
            self._thread_ended = True
            self.driver.end()
            return
        steps = self.driver.steps
        with self._order.kept():
            self.pause = self.driver.turn()
        self._check_reads()
        if self.size.step_seconds and self.driver.steps > steps:
            self._computes_until = self._clock() + self.size.step_seconds
        if self.pause is not None:
            seconds = self.pause.seconds
            self._until = None if seconds is None else self._clock() + seconds

    def flip_cached_block(self, random: Random) -> str:
        """Flip a bit of a sealed device block without a holder, if all of these are compared when they are hit.

        Returns which, empty if there is none.
        """
        if self.size.compared_share < 1 or self.link.has_answers:  # a seal may not be written yet
            return ""
        blocks = enumerate(range(1, kind.device.total + 1) for kind in self._kinds)
        found = [(kind, block) for kind, own in blocks for block in own if self._is_cached(kind, block)]
        return self._flip_one(random, found, host=False)

    def flip_host_block(self, random: Random, *, held: bool) -> str:
        """Flip a bit of a host block that a sequence holds, or one that a key finds; return which, empty if none."""
        if self.link.has_answers:  # a copy may not be made yet
            return ""
        found = [
            (number, block)
            for number, kind in enumerate(self._kinds)
            for block in range(1, kind.host.total + 1)
            if (kind.host.ref_count(block) if held else kind.host.key(block) is not None)
        ]
        return self._flip_one(random, found, host=True)

    def _flip_one(self, random: Random, found: Sequence[tuple[int, int]], *, host: bool) -> str:
        if not self.size.compares or not found:
            return ""
        number, block = random.choice(found)
        one = self.memory.kinds[number]
        one.flipped.flip(random, one.host if host else one.device, block, host=host)
        return f"{'host ' if host else ''}block {block} of kind {number}"

    @property
    def _kinds(self) -> Sequence[PoolState]:
        return self.pool.state.kinds

    def _is_cached(self, kind: int, block: int) -> bool:
        device = self._kinds[kind].device
        key = device.key(block)
        sealed = self.seals is not None and self.seals.key(kind, block) == key
        return key is not None and sealed and not device.ref_count(block)

    def _check_reads(self) -> None:
        """Check the steps of a turn: none reads a flipped block, or uses a condemned one. Raises Violation."""
        plans = self.runner.plans[self._checked_plans :]
        self._checked_plans = len(self.runner.plans)
        if self.proof is None or not (self.proof.condemned or any(one.flipped.any for one in self.memory.kinds)):
            return
        for plan in plans:
            if block := self.runner.flipped_read(plan):
                raise Violation(f"{self.name} computes from {block}, which was flipped")
            for work in plan.work:
                if faults := self.proof.faults_of((work.block_table, *work.window_tables)):
                    raise Violation(f"{self.name}: {faults[0]}")

    def end(self, grace_seconds: float) -> None:
        """End the process as SIGTERM does, after its requests or this time."""
        self.ending = True
        self._servicer.retire()
        self.start(self._end(grace_seconds))

    async def _end(self, grace_seconds: float) -> None:
        await finish(self.driver, self._servicer, self.link, grace_seconds)
        self.exit = "it was ended"

    def _make_proof(self) -> WatchedProof | None:
        """Make what compares its blocks, as engines on a CPU do that have checksums or keep their blocks."""
        if self.size.plans_ahead or not (self.size.checksums or self.seals):
            return None
        if self.seals is None:
            host = [one.host if len(one.host) > 1 else None for one in self.memory.kinds]
            memory = KeptMemory.private(zip([one.device for one in self.memory.kinds], host, strict=True))
            self.seals = SealWriter(memory, self._clock)
            self._sealed = SealedBlocks(self.seals)
        withheld = self._kept.withheld if self._kept else ()
        condemned = {(kind, False, block) for kind, blocks in enumerate(withheld) for block in blocks}
        shares = self.size.compared_share, self.size.recomputed_share
        return WatchedProof(self.memory, self.seals, shares, condemned)

    def _open(self, folder: Path) -> None:
        reports = RequestReports(MODEL, self.name, Tracing())
        self._attach(lambda: self.driver.wake(), reports.trace_parents)
        runner = self.runner if self.seals is None or self.proof else SealingRunner(self.runner, self.seals)
        engine = Engine(self.scheduler, runner, self.link, self._clock, self.proof)
        recorder = RequestsRecorder("")
        recorder.begin(self.scheduler, self.name)
        self.driver = EngineDriver(
            engine,
            STOP,
            _SECONDS_WITHOUT_MANAGER,
            EngineObserver(),
            recorder,
            reports,
            clock=self._clock,
            wait=_already_sent,
        )
        self._serve(folder)

    def _serve(self, folder: Path) -> None:
        tokenizer = TokenizerFiles(folder)
        description = engine_pb2.GetEngineResponse(
            model=MODEL,
            engine_id=self.name,
            model_fingerprint=FINGERPRINT,
            context_tokens=self.size.context_tokens,
            vocabulary_size=VOCABULARY,
            block_size=self.size.block_size,
            device_blocks=self.size.device_blocks,
            tokenizer_digest=tokenizer.digest(),
            max_sequences=self.size.limits.max_sequences,
            features=FEATURES,
        )
        self._servicer = servicer = EngineServicer(heartbeat_seconds=_HEARTBEAT_SECONDS)
        servicer.begin(self.driver, Constraints(folder, VOCABULARY, STOP), description, tokenizer)
        server = SimulatedServer(self.loop)
        engine_pb2_grpc.add_EngineServicer_to_server(servicer, server)  # type: ignore[arg-type]
        self._network.listen(address_of(self.name), server)


def address_of(engine_id: str) -> str:
    """Return the address of an engine."""
    return f"{engine_id}:1"


def _already_sent(sent: threading.Event, seconds: float) -> bool:
    """Return at once: the engine's thread cannot wait for its own loop in one thread."""
    del sent, seconds
    return True
