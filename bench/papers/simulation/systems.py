"""The systems that are compared: a block manager, the limits of its scheduler, and how its memory is used."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bench.papers.baselines.contiguous_blocks import ContiguousBlocks, Demand
from bench.papers.baselines.slabs import reservations
from bench.papers.simulation.scenario import FASTER_TRANSFORMER, PAGED, VOCABULARY, InvalidScenario, Scenario
from bench.papers.simulation.traces import Arrival
from blocks import BlockManager
from engine.errors import InvalidRequest
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits, Preemption
from engine.schedule.request import Request
from tests.in_process import InProcessBlocks

_UNBOUNDED = 1 << 40  # requests that may wait
# Limits of the paper's artifact: tokens and sequences of one iteration, and vLLM's watermark, beside which an admission
# leaves nothing free. A batch of FasterTransformer is not bounded by tokens.
_TOKEN_BUDGET, _PAGED_SEQUENCES, _ORCA_SEQUENCES, _WATERMARK = 2_560, 2_048, 256, 0.01
_STATIC_TOKEN_BUDGET = 1 << 20

# Shares of the memory, from the number of tokens with K and V of each sequence.
Shares = Callable[[Mapping[int, int]], Mapping[str, float]]


class System(NamedTuple):
    """A system. `batches` has the request ids of static batches, which end with their longest request."""

    blocks: BlockManager
    capacity: Capacity
    limits: Limits
    shares: Shares
    batches: Sequence[Sequence[str]] = ()


def build(scenario: Scenario, arrivals: Sequence[Arrival]) -> System:
    """Return the system of a scenario with its memory empty."""
    return _paged(scenario) if scenario.system == PAGED else _contiguous(scenario, arrivals)


def check_fits(requests: Sequence[Request], system: System) -> None:
    """Raise InvalidScenario if a request could never be served."""
    for request in requests:
        try:
            system.capacity.check(request)
        except InvalidRequest as error:
            raise InvalidScenario(f"request {request.request_id} of the trace does not fit: {error}") from error


def _capacity(scenario: Scenario, host_blocks: int = 0) -> Capacity:
    paged = scenario.system == PAGED
    sizes = (scenario.context_tokens, VOCABULARY, scenario.block_size, scenario.blocks, host_blocks)
    return Capacity(*sizes, caches_prefixes=paged)


def _paged(scenario: Scenario) -> System:
    preemption = Preemption(scenario.preemption)
    capacity = _capacity(scenario, 0 if preemption is Preemption.RECOMPUTE else scenario.blocks)
    blocks = InProcessBlocks(capacity)
    limits = Limits(
        token_budget=_TOKEN_BUDGET,
        max_sequences=_PAGED_SEQUENCES,
        max_waiting=_UNBOUNDED,
        preemption=preemption,
        admission_watermark=_WATERMARK,
        growth_reserve=scenario.growth_reserve,
    )

    alone = scenario.sequences == 1 and not scenario.prefix_tokens
    slots = scenario.blocks * scenario.block_size

    def shares(computed: Mapping[int, int]) -> Mapping[str, float]:
        held, saved = blocks.pool.device.counts.held, blocks.pool.device.saved
        shown = {"held": held, "saved": saved, "unshared": held + saved}
        found = {name: count / scenario.blocks for name, count in shown.items()}
        return found | {"tokens": sum(computed.values()) / slots} if alone else found

    return System(blocks, capacity, limits, shares)


def _contiguous(scenario: Scenario, arrivals: Sequence[Arrival]) -> System:
    static = scenario.system == FASTER_TRANSFORMER
    reserve = reservations(scenario.context_tokens)["max" if static else scenario.system]
    demands = {f"r{number}": Demand(one.lengths, scenario.sequences) for number, one in enumerate(arrivals)}
    blocks = ContiguousBlocks(scenario.blocks, scenario.block_size, reserve, demands, static_batches=static)
    if unfit := blocks.find_unfit():
        raise InvalidScenario(
            f"blocks: {scenario.blocks} blocks cannot hold the {scenario.sequences} slabs that {scenario.system} "
            f"reserves for request {unfit} of {sum(demands[unfit].lengths)} tokens"
        )
    limits = Limits(_STATIC_TOKEN_BUDGET if static else _TOKEN_BUDGET, _ORCA_SEQUENCES, _UNBOUNDED)
    batches = blocks.batches if static else ()
    return System(blocks, _capacity(scenario), limits, lambda computed: blocks.shares(computed)._asdict(), batches)
