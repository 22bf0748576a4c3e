"""A random scenario: sizes of everything, requests, and faults, all drawn from a seed before it begins."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from blocks import WindowKind
from engine.schedule.limits import Limits, Preemption
from simulation.network.connections import Latency
from simulation.processes.attached import EngineSize
from simulation.processes.gateway import GatewayLimits
from simulation.processes.manager import ManagerLimits
from simulation.processes.steps import StepsPlan
from simulation.tokenizer import LETTERS

SECONDS = 10.0  # of load and faults
SALTS = ("", "salt")

_BLOCK_SIZES = (1, 2, 3, 4)
_MOST_REQUESTS = 60
_MOST_STEPS = 200
_LONGEST_PROMPT = 40
_LONGEST_OUTPUT = 40
# Of a fault, on average, behind a request's arrival: about as long as a request lives.
_FAULT_DELAY_SECONDS = 0.02
# One of this many requests generates nothing.
_PROMPTS_ALONE = 16
# Between requests of a burst, at most.
_BURST_SECONDS = 0.004


class PlannedRequest(NamedTuple):
    """A request: when, at which gateway, what; `timeout` is its own, and the client leaves after `cancel_after`.

    With `beams` it is a search of that width, and has as many samples; 0: its samples are drawn.
    """

    at: float
    gateway: int
    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    samples: int
    beams: int
    seed: int
    stop: str
    salt: str
    priority: int
    timeout: float | None
    cancel_after: float | None


class PlannedFault(NamedTuple):
    """A fault: its time and kind, the number of the process among those of its kind, and its duration in seconds.

    An engine whose kept blocks are to be flipped is killed before. Numbers are taken modulo the number of processes: of
    engines first, then of clients that send random block steps. Kinds that happen at once have no duration; the wall
    clock steps by it. A process that is to `reconnect` loses its connections, and the next one that it makes soon
    carries nothing.
    """

    at: float
    kind: str
    number: int = 0
    seconds: float = 0.0


FAULTS = (
    "kill the manager",
    "kill an engine",
    "kill a gateway",
    "end an engine",
    "end a gateway",
    "stop the manager",
    "stop an engine",
    "stop a gateway",
    "cut the manager",
    "cut an engine",
    "cut a gateway",
    "silence an engine",
    "silence a gateway",
    "reconnect an engine",
    "reconnect a gateway",
    "start a second engine",
    "start a second manager",
    "fail a step",
    "withhold a block",
    "step the wall clock",
)
FLIPS = (
    "flip what an engine kept",
    "flip a host block of an engine",
    "flip a cached block of an engine",
)

_KILLS = FAULTS[:3]
_RECONNECTIONS = tuple(kind for kind in FAULTS if kind.startswith("reconnect"))
_LASTING = ("end ", "stop ", "silence ", "reconnect ", "step ")
_DURATIONS = (0.02, 0.5, 4.0, 12.0)
# Longer than all timeouts of handshakes, links and clients.
_LONG_SECONDS = 90.0


class _Lengths(NamedTuple):
    """Most tokens of a request: of its prompt, of the end of it that is its own, and of its output."""

    prompt: int
    own: int
    output: int


_LENGTHS = (*[_Lengths(_LONGEST_PROMPT, 4, 10)] * 3, _Lengths(_LONGEST_PROMPT, 4, _LONGEST_OUTPUT))
# Of prompts that begin alike, which hit blocks, and of requests that are preempted because they grow.
_FLIPPED_LENGTHS = (_Lengths(_LONGEST_PROMPT, 1, 3), _Lengths(_LONGEST_PROMPT, 1, 10), _Lengths(3, 2, _LONGEST_OUTPUT))


@dataclass(frozen=True)
class Scenario:
    """What happens from outside, in the order of time, and the sizes. `order` seeds the order of events."""

    order: int
    engines: tuple[EngineSize, ...]
    steps: tuple[tuple[EngineSize, StepsPlan], ...]  # of the clients of the manager that send random block steps
    gateways: tuple[GatewayLimits, ...]
    manager: ManagerLimits
    latency: Latency
    store_kills: float = 0.0  # probability that a process is killed after a store to kept memory
    requests: tuple[PlannedRequest, ...] = ()
    faults: tuple[PlannedFault, ...] = ()

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
    gateways = tuple(_gateway(random) for _ in range(random.choice((1, 1, 2))))
    flip_count = random.choice((0, 0, 0, 5, 20, 60))
    engines = tuple(_size(random, flips=flip_count > 0) for _ in range(random.choice((1, 1, 2, 2, 3))))
    lengths = random.choice(_FLIPPED_LENGTHS if flip_count else _LENGTHS)
    requests = tuple(_requests(random, engines, len(gateways), lengths))
    fault_count = random.choice((0, 0, 5, 20) if flip_count else (0, 5, 20, 60, 100))
    flips = _flips(random, [one.at for one in requests], flip_count)
    return Scenario(
        order=random.getrandbits(32),
        engines=engines,
        steps=tuple(_steps(random) for _ in range(random.choice((0, 1)))),
        gateways=gateways,
        manager=ManagerLimits(random.choice((0.3, 1.0, 3.0, 10.0)), random.choice((1, 4, 1000))),
        latency=Latency(
            random.choice((0.0002, 0.002, 0.02)), random.choice((0.05, 0.5, 3.0)), random.choice((0.0, 0.02, 0.2))
        ),
        requests=requests,
        faults=tuple(sorted([*_faults(random, [one.at for one in requests], fault_count), *flips])),
        store_kills=random.choice((0.0, 0.0, 0.001, 0.02)),
    )


def _gateway(random: Random) -> GatewayLimits:
    return GatewayLimits(requests=random.choice((3, 1000, 1000)))


def _steps(random: Random) -> tuple[EngineSize, StepsPlan]:
    size = replace(_size(random, flips=False), windows=(), retention_tokens=0)
    return size, StepsPlan(random.getrandbits(32), random.randint(20, _MOST_STEPS))


def _size(random: Random, *, flips: bool) -> EngineSize:
    """Draw the size of an engine; if `flips` are drawn too, one whose blocks leave steps more often."""
    block_size = random.choice(_BLOCK_SIZES)
    blocks = random.randint(2, 14)
    sequences = random.randint(3 if flips else 1, 6)
    limits = Limits(
        token_budget=max(sequences, random.choice((2, 8, 24))),
        max_sequences=sequences,
        max_waiting=random.choice((2, 1000, 1000)),
        preemption=random.choice((*Preemption, *[Preemption.SWAP] * 3) if flips else tuple(Preemption)),
        admission_watermark=0.0 if flips else random.choice((0.0, 0.1, 0.5)),
        priority_aging=random.choice((0.0, 2.0)),
        proposed_tokens=random.choice((0, 0, 3)),
        admission_budget=random.choice((0, 0, 4)),
        long_prefill_token_threshold=random.choice((0, 3, 10)),
        max_num_partial_prefills=2,
        max_long_partial_prefills=random.choice((1, 2)),
    )
    ahead = random.random() < (0.1 if flips else 0.3)
    windows = _windows(random, block_size, blocks)
    return EngineSize(
        block_size,
        blocks,
        blocks if flips else random.randint(0, blocks),
        limits,
        ahead=ahead,
        step_seconds=random.choice((0.0, 0.005, 0.05) if flips else (0.0, 0.0, 0.0, 0.005, 0.05)),
        keeps=not ahead and random.random() < 0.6,  # engines that run ahead are on GPUs
        checksums=random.random() < 0.9,
        compared_share=random.choice((0.0, 0.5, 1.0)),
        recomputed_share=random.choice((0.0, 0.3)),
        windows=windows,
        retention_tokens=random.choice((0, 0, 2 * block_size)) if windows else 0,
    )


def _windows(random: Random, block_size: int, blocks: int) -> tuple[WindowKind, ...]:
    """Draw window kinds of a pool with this many blocks of kind 0."""
    kinds = []
    for number in range(random.choice((0, 0, 1, 1, 2))):
        tokens = random.choice((1, block_size, block_size + 1, 3 * block_size))
        own = random.choice((blocks, max(2, blocks // 2)))
        kinds.append(WindowKind(f"window-{number}", tokens, own, random.randint(0, own), random.random() < 0.3))
    return tuple(kinds)


def _requests(random: Random, engines: Sequence[EngineSize], gateways: int, lengths: _Lengths) -> list[PlannedRequest]:
    """Draw requests, most of which fit into each engine's pool."""
    rate = random.choice((1.0, 5.0, 20.0))
    shared = tuple(random.randint(1, len(LETTERS)) for _ in range(_LONGEST_PROMPT))
    salts = random.choice((SALTS[:1], SALTS))
    tokens = min(one.block_size * one.device_blocks for one in engines)
    most_samples = min(one.limits.max_sequences for one in engines)
    burst = random.choice((1, 1, 6))
    made: list[PlannedRequest] = []
    at = 0.0
    while len(made) < _MOST_REQUESTS:
        at += random.random() * _BURST_SECONDS if len(made) % burst else random.expovariate(rate)
        if at >= SECONDS:
            break
        fits = random.random() < 0.95
        samples = random.choice((1, 1, 1, 2, 4))
        samples = min(samples, most_samples) if fits else samples
        room = max(2, tokens // samples) if fits else 30
        max_tokens, prompt = _max_tokens_and_prompt(random, room, shared, lengths)
        beams = samples if random.random() < 0.1 else 0
        one = PlannedRequest(
            at=at,
            gateway=random.randrange(gateways),
            name=f"r{len(made)}",
            prompt=prompt,
            max_tokens=max_tokens,
            samples=samples,
            beams=beams,
            seed=random.getrandbits(16),
            stop="" if beams else random.choice(("", "", "", random.choice(LETTERS))),
            salt=random.choice(salts),
            priority=random.choice((0, 0, 0, -1, 3)),
            timeout=random.choice((None, None, None, 0.5, 5.0)),
            cancel_after=random.expovariate(10) if random.random() < 0.15 else None,
        )
        made.append(one._replace(max_tokens=0) if not (beams or one.seed % _PROMPTS_ALONE) else one)
    return made


def _max_tokens_and_prompt(
    random: Random, room: int, shared: tuple[int, ...], lengths: _Lengths
) -> tuple[int, tuple[int, ...]]:
    """Draw a request with room for `room` tokens: often one that fills it, and mostly one that begins as others do."""
    max_tokens = random.randint(1, min(lengths.output, room - 1))
    most = min(lengths.prompt, room - max_tokens)
    length = most if random.random() < 0.3 else random.randint(1, most)
    own = min(length, random.randint(1, lengths.own))
    return max_tokens, (*shared[: length - own], *(random.randint(1, len(LETTERS)) for _ in range(own)))


def _faults(random: Random, arrivals: Sequence[float], count: int) -> list[PlannedFault]:
    """Draw faults, most of them soon after the arrival of a request, while it is served."""
    kinds = [*random.sample(FAULTS, random.randint(1, len(FAULTS))), *random.choices(_KILLS, k=3)]
    durations: tuple[float, ...] = _DURATIONS
    if random.random() < 0.15:
        durations += (_LONG_SECONDS, _LONG_SECONDS)
        kinds += _RECONNECTIONS * 2
    return sorted(_planned_fault(random, arrivals, random.choice(kinds), durations) for _ in range(count))


def _flips(random: Random, arrivals: Sequence[float], count: int) -> list[PlannedFault]:
    return [
        PlannedFault(_fault_time(random, arrivals), random.choice(FLIPS), random.randrange(6)) for _ in range(count)
    ]


def _planned_fault(random: Random, arrivals: Sequence[float], kind: str, durations: Sequence[float]) -> PlannedFault:
    number, seconds = random.randrange(6), random.choice(durations)
    if "step the" in kind:
        seconds = random.choice((seconds, -5.0))
    return PlannedFault(
        at=_fault_time(random, arrivals),
        kind=kind,
        number=0 if "manager" in kind or "clock" in kind else number,
        seconds=seconds if kind.startswith(_LASTING) else 0.0,
    )


def _fault_time(random: Random, arrivals: Sequence[float]) -> float:
    if arrivals and random.random() < 0.9:
        return min(SECONDS, random.choice(arrivals) + random.expovariate(1 / _FAULT_DELAY_SECONDS))
    return random.random() * SECONDS
