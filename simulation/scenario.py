"""A random scenario: sizes of everything, requests, and faults, all drawn from a seed before it begins."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import NamedTuple

from engine.schedule.limits import Limits, Preemption
from simulation.network import Latency
from simulation.processes import PoolSize

SECONDS = 30.0  # of load and faults
_BLOCK_SIZES = (1, 2, 3, 4)


class PlannedRequest(NamedTuple):
    """A request: when, at which gateway, what; `cancel_after` seconds the client leaves."""

    at: float
    gateway: int
    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    samples: int
    seed: int
    timeout: float | None
    cancel_after: float | None


class PlannedFault(NamedTuple):
    """A fault: when, which kind, of the process with this number among its kind, for so many seconds."""

    at: float
    kind: str
    number: int
    seconds: float


FAULTS = (
    "kill the manager",
    "kill an engine",
    "kill a gateway",
    "stop the manager",
    "stop an engine",
    "stop a gateway",
    "cut the manager",
    "cut an engine",
    "cut a gateway",
    "silence an engine",
    "a second engine",
    "a second manager",
    "step the wall clock",
)


@dataclass(frozen=True)
class Scenario:
    """What happens from outside, in the order of time, and the sizes. `order` seeds the order of events."""

    order: int
    engines: int
    gateways: int
    sizes: tuple[PoolSize, ...]
    lease_seconds: float
    latency: Latency
    requests: tuple[PlannedRequest, ...]
    faults: tuple[PlannedFault, ...] = field(default=())

    def without(self, requests: Sequence[PlannedRequest] = (), faults: Sequence[PlannedFault] = ()) -> "Scenario":
        """Return it without these."""
        return replace(
            self,
            requests=tuple(one for one in self.requests if one not in requests),
            faults=tuple(one for one in self.faults if one not in faults),
        )


def drawn(seed: int) -> Scenario:
    """Draw a scenario."""
    random = Random(seed)
    engines, gateways = random.choice((1, 1, 2, 2, 3)), random.choice((1, 1, 2))
    sizes = tuple(_size(random) for _ in range(engines))
    latency = Latency(random.choice((0.0002, 0.002, 0.02)), random.choice((0.05, 0.5, 3.0)), random.choice((0, 0.02)))
    requests = tuple(_requests(random, gateways))
    faults = tuple(_faults(random, random.choice((0, 2, 8, 30))))
    return Scenario(
        random.getrandbits(32), engines, gateways, sizes, random.choice((1.0, 3.0, 10.0)), latency, requests, faults
    )


def _size(random: Random) -> PoolSize:
    block_size = random.choice(_BLOCK_SIZES)
    blocks = random.randint(2, 14)
    sequences = random.randint(1, 6)
    limits = Limits(
        token_budget=max(sequences, random.choice((2, 8, 24))),
        max_sequences=sequences,
        preemption=random.choice(tuple(Preemption)),
        admission_watermark=random.choice((0.0, 0.1, 0.5)),
        priority_aging=random.choice((0.0, 2.0)),
        proposed_tokens=random.choice((0, 0, 3)),
    )
    return PoolSize(block_size, blocks, random.randint(0, blocks), limits)


def _requests(random: Random, gateways: int) -> list[PlannedRequest]:
    rate = random.choice((1.0, 5.0, 20.0))
    shared = tuple(random.randint(1, 7) for _ in range(12))
    made, at = [], 0.0
    while (at := at + random.expovariate(rate)) < SECONDS and len(made) < 200:
        own = tuple(random.randint(1, 7) for _ in range(random.randint(1, 4)))
        made.append(
            PlannedRequest(
                at,
                random.randrange(gateways),
                f"r{len(made)}",
                (*shared[: random.randint(0, 12)], *own),
                random.randint(1, 10),
                random.choice((1, 1, 1, 2, 4)),
                random.getrandbits(16),
                random.choice((None, None, 0.5, 5.0)),
                random.expovariate(1) if random.random() < 0.15 else None,
            )
        )
    return made


def _faults(random: Random, count: int) -> list[PlannedFault]:
    kinds = random.sample(FAULTS, random.randint(1, len(FAULTS)))
    made = [
        PlannedFault(
            random.random() * SECONDS,
            random.choice(kinds),
            random.randrange(6),
            random.choice((0.02, 0.5, 4.0, 12.0, -5.0)),
        )
        for _ in range(count)
    ]
    return sorted(made)
