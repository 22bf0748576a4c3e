"""A process that owns a pool: it keeps a stream to the KV manager, through the product's own client."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from blocks import WindowKind
from engine.kept.seal_writer import SealWriter
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from kvmanager import Pool, PoolReport, PoolSpec
from services.engine.block_client import AttachRefused, BlockClient, SealedBlocks
from services.engine.kept.kept_report import kept_report
from simulation.digest_memory import DigestMemory
from simulation.network.channel import SimulatedChannel
from simulation.network.connections import Network
from simulation.processes.kept import SharedMemory
from simulation.processes.manager import ADDRESS
from simulation.processes.process import Process

MODEL = "m"
FINGERPRINT = "f"
VOCABULARY = 8
_BOOT = "simulated"


@dataclass(frozen=True)
class EngineSize:
    """The size of an engine's pool, how it schedules, and how long a step of its model takes."""

    block_size: int = 2
    device_blocks: int = 12
    host_blocks: int = 4
    limits: Limits = field(default_factory=lambda: Limits(token_budget=16, max_sequences=6))
    context_tokens: int = 64
    ahead: bool = False
    step_seconds: float = 0.0
    keeps: bool = False  # its blocks outlive its process
    checksums: bool = True  # unless it plans ahead
    compared_share: float = 0.0  # of the blocks that are hit and never left
    recomputed_share: float = 0.0  # of the hits
    windows: tuple[WindowKind, ...] = ()
    retention_tokens: int = 0

    @property
    def plans_ahead(self) -> bool:
        """Whether its scheduler plans ahead: proposals continue the tokens of the step before."""
        return self.ahead and not self.limits.proposed_tokens

    @property
    def compares(self) -> bool:
        """Whether its blocks are compared with their checksums."""
        return self.checksums and not self.plans_ahead

    def capacity(self) -> Capacity:
        """Return it as the scheduler's capacity."""
        sizes = self.context_tokens, VOCABULARY, self.block_size, self.device_blocks, self.host_blocks
        return Capacity(*sizes, windows=self.windows, step_tokens=self.limits.token_budget)


@dataclass(frozen=True)
class Incarnation:
    """A start of an engine: its number, from the machine's wall clock, and the nanoseconds since the boot."""

    number: int
    started_after_boot: int


_NO_TRACE_PARENTS: Mapping[str, str] = {}


class AttachedProcess(Process):
    """Owns a pool of a KV manager, and the memory of its blocks."""

    link: BlockClient
    memory: DigestMemory

    def __init__(
        self,
        network: Network,
        clock: Callable[[], float],
        engine_id: str,
        incarnation: Incarnation,
        size: EngineSize,
        shared: SharedMemory | None = None,
        *,
        compares: bool = False,
    ) -> None:
        """With `compares`, the blocks of shared memory have checksums."""
        super().__init__(engine_id, clock)
        self.shared = shared
        self.seals: SealWriter | None = None
        self._sealed: SealedBlocks | None = None
        self._kept: PoolReport | None = None
        self.flipped = ""  # what was flipped before it started
        if shared is not None:
            self.flipped = shared.give_to(self)
            self.seals = SealWriter(shared.kept, clock if compares else None)
            self._kept = kept_report(shared.kept)
            self._sealed = SealedBlocks(self.seals, self._kept)
            shared.adopted += len(self._kept.device.keyed)
        self.incarnation = incarnation
        self.size = size
        self._clock = clock
        self._network = network

    @property
    def pool(self) -> Pool:
        """The replica of the pool."""
        return self.link.replica.pool

    @property
    def all_written(self) -> bool:
        """Whether the engine's thread has written everything that the replica has applied."""
        assert self.seals is not None, "it keeps its blocks"
        idle = not (self.link.has_answers or self.link.replica.has_changes or self.seals.has_pending)
        return idle and not (self.killed_inside or self.loop.failures)

    def _attach(self, wake: Callable[[], None], trace_parents: Mapping[str, str] = _NO_TRACE_PARENTS) -> None:
        """Keep the pool attached. Call it on the process's loop."""
        self.link = BlockClient(
            ADDRESS,
            self._spec(),
            wake,
            trace_parents=trace_parents,
            connect=lambda: SimulatedChannel(self._network, self.loop, ADDRESS),  # type: ignore[arg-type,return-value]
            sealed=self._sealed,
        )
        self.start(self._stay_attached())

    def _spec(self) -> PoolSpec:
        return PoolSpec(
            engine_id=self.name,
            incarnation=self.incarnation.number,
            model_fingerprint=FINGERPRINT,
            block_size=self.size.block_size,
            device_blocks=self.size.device_blocks,
            host_blocks=self.size.host_blocks,
            windows=self.size.windows,
            retention_tokens=self.size.retention_tokens,
            model=MODEL,
            boot_id=_BOOT,
            started_after_boot=self.incarnation.started_after_boot,
        )

    async def _stay_attached(self) -> None:
        try:
            await self.link.run()
        except AttachRefused as refused:
            self.exit = str(refused)
