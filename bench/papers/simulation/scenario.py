"""What is simulated: a system, a model on a device, and a workload."""

from dataclasses import dataclass

from bench.papers.simulation.beam_trace import VOCABULARY_OF_NODES, WIDTHS
from bench.papers.simulation.cost_model import CostModel, fit_of, place, roofline_of, transfers_of
from bench.papers.simulation.simulated_runner import FIRST_NODE
from bench.papers.simulation.traces import CONTEXT_TOKENS, NEW_CONVERSATIONS, Arrival, load, poisson, turns
from engine.schedule.limits import Preemption
from engine.schedule.request import BeamSearch, Request, Sampling, Stopping

PAGED = "paged"
FASTER_TRANSFORMER = "fastertransformer"
ORCAS = ("oracle", "pow2", "max")
SYSTEMS = (PAGED, *ORCAS, FASTER_TRANSFORMER)
VOCABULARY = FIRST_NODE + VOCABULARY_OF_NODES  # tokens of prompts and samples, then those of replayed beams
_FIT = "fit"
COSTS = (_FIT, "low", "middle", "high")
_DISTINCT = FIRST_NODE - 1  # token ids other than that of a common prefix
PREEMPTIONS = tuple(one.value for one in Preemption)
_BOUNDS = {
    "warm_up": (0.0, 0.9),
    "blocks": (1, 1 << 20),
    "block_size": (1, CONTEXT_TOKENS),
    "samples": (1, 64),
    "beams": (0, max(WIDTHS)),
    "prefix_tokens": (0, CONTEXT_TOKENS),
}


class InvalidScenario(ValueError):
    """A scenario that cannot be simulated; the message names the field and what is possible."""


@dataclass(frozen=True)
class Scenario:
    """One run. Raises InvalidScenario.

    `blocks` of `block_size` tokens hold K and V; as many on the host hold preempted requests if they are swapped.
    Requests arrive at `rate` a second for `seconds` seconds; each has `samples` samples or `beams` beams, and a prompt
    that begins with `prefix_tokens` common tokens, by which the model's context grows. `cost` is `fit`, or `low`,
    `middle` or `high` for a roofline. A swapped block is one piece (`one_piece`), or two for each layer.

    Averages leave out `warm_up`, a share of the time of the arrivals. With `growth_reserve` the paged system admits as
    Quire does, and leaves a block free for each running sequence; without, it leaves the watermark, as in the paper.

    With a `latency_limit` (seconds per token) a run ends as soon as its normalized latency is surely above it. Without
    one it ends with the last arrival.
    """

    system: str
    model: str
    device: str
    blocks: int
    workload: str
    rate: float
    ranks: int = 1
    seconds: float = 600.0
    samples: int = 1
    beams: int = 0
    block_size: int = 16
    prefix_tokens: int = 0
    cost: str = _FIT
    preemption: str = Preemption.RECOMPUTE.value
    one_piece: bool = True
    latency_limit: float | None = None
    seed: int = 0
    warm_up: float = 0.1
    growth_reserve: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            if not least <= getattr(self, name) <= most:
                raise InvalidScenario(f"{name} must be between {least} and {most}, not {getattr(self, name)}")
        for name, known in {"system": SYSTEMS, "preemption": PREEMPTIONS, "cost": COSTS}.items():
            if getattr(self, name) not in known:
                raise InvalidScenario(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")
        if self.beams and self.beams not in WIDTHS:
            raise InvalidScenario(f"beams must be one of 0, {', '.join(map(str, WIDTHS))}, not {self.beams}")
        if self.beams and self.samples > 1:
            raise InvalidScenario(f"samples must be 1 with beams, not {self.samples}")
        if self.latency_limit is not None and not self.latency_limit > 0:
            raise InvalidScenario(f"latency_limit must be above 0, not {self.latency_limit}")

    @property
    def sequences(self) -> int:
        """Number of sequences of each request."""
        return self.beams or self.samples

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest request."""
        return CONTEXT_TOKENS + self.prefix_tokens

    def cost_model(self) -> CostModel:
        """Return the durations of steps. Raises InvalidCostModel."""
        placement = place(self.model, self.device, self.ranks)
        transfers = transfers_of(placement, self.block_size, one_piece=self.one_piece)
        if self.cost == _FIT:
            return fit_of(self.model, self.device, self.ranks, transfers)
        return roofline_of(placement, self.cost, transfers)

    def arrivals(self) -> list[Arrival]:
        """Draw the requests, each with the common prefix in its prompt. Raises InvalidTrace."""
        if (new := NEW_CONVERSATIONS.get(self.workload)) is not None:
            drawn = turns(new, self.rate, self.seconds, self.seed)
        else:
            drawn = poisson(load(self.workload), self.rate, self.seconds, self.seed)
        return [Arrival(at, one._replace(prompt=one.prompt + self.prefix_tokens)) for at, one in drawn]

    def request(self, number: int, arrival: Arrival) -> Request:
        """Return an arrival as a request of the engine. Behind the common prefix, no two prompts are equal."""
        rest = arrival.lengths.prompt - self.prefix_tokens
        prompt = (0,) * self.prefix_tokens + (1 + number % _DISTINCT, 1 + number // _DISTINCT)
        return Request(
            request_id=f"r{number}",
            prompt=(prompt + (0,) * rest)[: arrival.lengths.prompt],
            sampling=Sampling(temperature=0.0 if self.beams else 1.0),
            stopping=Stopping(arrival.lengths.output),
            arrival=arrival.seconds,
            samples=((),) * self.samples,
            beam_search=BeamSearch(self.beams) if self.beams else None,
        )
