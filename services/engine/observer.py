"""Observer of an engine: the start, and each step."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from engine.proof.block_proof import ProofCounts
from engine.schedule.stats import SchedulerTotals
from services.engine.events.event_stream import StreamStats
from services.engine.events.settings import PublisherStats


class RankStats(NamedTuple):
    """The ranks of an engine: what rank 0 sends to the others, and how long it waits for them.

    `wait_seconds` is the time of rank 0 in collectives; on a GPU only that of queueing them. `plans` and `plan_bytes`
    count the plans that each other rank has received. `seconds_behind` is, for each rank, the time from sending the
    latest launched plan to its launch there.
    """

    wait_seconds: float
    plans: int
    plan_bytes: int
    seconds_behind: Mapping[int, float]


class ModelFormats(NamedTuple):
    """Names of the types of a model's numbers: of computation, of the weights, and of the KV cache."""

    dtype: str
    weights: str
    kv_dtype: str


class KeptStats(NamedTuple):
    """Blocks of each tier in memory that outlives the engine.

    `sealed` ones would outlive it now. `adopted` were found at the start, `lost` were held and not whole when the
    earlier process ended. `refused` is the difference for which the memory of an earlier process was erased, empty if
    it was not. `broken` counts the seals that differed from their checksums at the start. `unknown` counts the adopted
    blocks of unknown tokens, of which KV events do not tell; None without events.
    """

    sealed: Mapping[str, int]
    adopted: Mapping[str, int]
    lost: Mapping[str, int]
    refused: str = ""
    broken: int = 0
    unknown: int | None = None


class CacheStats(NamedTuple):
    """The engine's pool: tokens of a block, blocks of each tier, and the share of device blocks that are held."""

    block_size: int
    device_blocks: int
    host_blocks: int
    usage: float


class EventStats(NamedTuple):
    """KV events: the stream, and the sockets at which they are published, None without."""

    stream: StreamStats
    publisher: PublisherStats | None


class SmgStats(NamedTuple):
    """The service for smg. `calls` of Generate and `subscribers` of KV events are those now.

    `batches` were sent to subscribers, `snapshots` were taken for them. `catch_ups` count how often one fell behind its
    queue.
    """

    calls: int = 0
    subscribers: int = 0
    batches: int = 0
    snapshots: int = 0
    catch_ups: int = 0


class EngineLoad(NamedTuple):
    """The part of an engine's state that each of its messages has; see EngineStats."""

    running: int
    waiting: int
    deferred: int
    uncomputed_tokens: int
    available_blocks: int


class EngineStats(NamedTuple):
    """State of an engine: requests as of the launch or the end of a step, the rest as of its end.

    `sessions` counts the pool's attachments. `uncomputed_tokens` is the number of prompt tokens that live requests
    still have to compute. `deferred` counts the waiting requests that would not start even if blocks were available.
    `recording_faults` has the kinds of steps that were to be recorded: why they are not, empty if they are.
    `seconds_without_step` is the time since the last step while requests are live. `proof` counts the blocks that were
    compared with their checksums, None without checksums. `events` are KV events, `smg` is the service for smg; None
    without.
    """

    running: int
    waiting: int
    totals: SchedulerTotals
    uncomputed_tokens: int = 0
    available_blocks: int = 0
    sessions: int = 0
    deferred: int = 0
    ranks: RankStats | None = None
    formats: ModelFormats | None = None
    seconds_without_step: float = 0.0
    recording_faults: Mapping[str, str] = MappingProxyType({})
    kept: KeptStats | None = None
    proof: ProofCounts | None = None
    cache: CacheStats | None = None
    events: EventStats | None = None
    smg: SmgStats | None = None


class StepStats(NamedTuple):
    """An executed step: its number of tokens, and the seconds of each phase.

    `seconds` is the time of the model and of sampling: `forward` plus `sample`. `plan` is the time before that, for
    planning and for requesting blocks. `wait` is idle time waiting for the KV manager. `publish` is the time after it,
    for delivering outputs. If steps are launched ahead, the next step runs during `plan` and `publish`.
    """

    tokens: int
    seconds: float
    plan: float
    wait: float
    forward: float
    sample: float
    publish: float


class EngineObserver:
    """Receives the start of an engine and its steps; this default ignores them."""

    def on_start(self, model_name: str, engine_id: str, stats: Callable[[], EngineStats]) -> None:
        """The model is loaded. `stats` can be called on the event loop from now on."""

    def on_step(self, step: StepStats) -> None:
        """A step was executed. Called on the engine's thread."""
