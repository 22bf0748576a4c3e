"""The parts of an engine that the server needs, as protocols."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from blocks import BlockManager
from engine.kept.seal_writer import SealWriter
from engine.proof.block_proof import BlockProof
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Runner
from kvmanager import PoolReport, PoolSpec
from services.engine.kept.origin_rows import OriginRows
from services.engine.observer import KeptStats, RankStats
from services.engine.settings import EngineSettings


class Model(Protocol):
    """Properties of a model."""

    @property
    def fingerprint(self) -> str:
        """Identifies the values of K and V: engines with equal fingerprints compute the same for the same tokens."""

    @property
    def vocabulary_size(self) -> int:
        """Upper bound of token ids, exclusive."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a text."""

    @property
    def weight_format(self) -> str:
        """Format of the weights: that of most quantized ones, such as Q4_1 or int8, or the name of their type."""

    @property
    def cache_dtype(self) -> object:
        """Type of the KV cache; `str` gives its name."""

    @property
    def dtype(self) -> object:
        """Type of weights that are not quantized; `str` gives its name."""


class OtherRanks(Protocol):
    """The other ranks of a model."""

    def watch(self, failed: Callable[[Exception], None]) -> None:
        """Watch the ranks from now on; `failed` receives the first failure, on another thread."""

    def reason(self, failure: Exception) -> Exception:
        """Return the failure of another rank if there is one: it explains a failure of this process."""

    def stats(self) -> RankStats:
        """Return what was sent to the ranks, and how long this process waited for them."""

    def close(self) -> None:
        """End all ranks."""


class Kept(Protocol):
    """Memory in which blocks outlive the process."""

    @property
    def report(self) -> PoolReport:
        """What an earlier process left."""

    @property
    def seals(self) -> SealWriter:
        """The writer of its seals."""

    @property
    def rows(self) -> OriginRows | None:
        """What the keys of its blocks are hashes of, None without KV events."""

    def stats(self) -> KeptStats:
        """Return the numbers of its blocks."""

    def end(self, *, keep: bool) -> None:
        """Give it up at a planned end, and erase it unless it is to be kept."""


class Parts(Protocol):
    """A model, the scheduler of its steps, and their runner; ready to be connected to a block manager."""

    @property
    def loaded(self) -> Model:
        """The model."""

    @property
    def scheduler(self) -> Scheduler:
        """Plans the steps; has the capacity."""

    @property
    def runner(self) -> Runner:
        """Executes the steps."""

    @property
    def device(self) -> str:
        """Class of the CPU's kernels, `cpu` without them, or the GPU's name."""

    @property
    def recording_faults(self) -> Mapping[str, str]:
        """Kinds of steps that were to be recorded, `decoding` or `prompts`: why they are not, empty if they are."""

    @property
    def kept(self) -> Kept | None:
        """The memory in which blocks outlive the process, None without."""

    @property
    def proof(self) -> BlockProof | None:
        """Makes copies and compares blocks with their checksums, None where steps make the copies."""

    @property
    def ranks(self) -> OtherRanks | None:
        """The other ranks of a model that several processes compute."""


class BlockLink(BlockManager, Protocol):
    """A pool's connection to its block manager. `attached` is set while it stands, `detached` while it does not."""

    attached: asyncio.Event
    detached: asyncio.Event

    @property
    def sessions(self) -> int:
        """Number of times that the pool was attached."""

    @property
    def usage(self) -> float:
        """Share of the pool's device blocks that are held, 0 to 1, in the kind that has the least room."""

    async def run(self) -> None:
        """Keep the connection until cancelled."""

    def close(self) -> None:
        """Give up the pool."""


# Makes the connection of a pool; the callback is to be called on the event loop whenever there is an answer.
Attachment = Callable[[PoolSpec, Callable[[], None]], BlockLink]

# Makes the parts, on a thread, because it may take seconds. Raises the error that prevents the engine's start.
Assembly = Callable[[EngineSettings], Parts]
