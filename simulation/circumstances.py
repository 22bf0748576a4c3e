"""Flips bits of blocks, and collects the circumstances in which a request fails."""

from collections import Counter
from random import Random

from blocks import blocks_for
from simulation.invariants.failures import Circumstances
from simulation.invariants.requests import Outcome
from simulation.processes.attached import EngineSize
from simulation.processes.engine import EngineProcess, address_of
from simulation.processes.gateway import GatewayProcess
from simulation.processes.manager import ManagerProcess
from simulation.scenario import PlannedRequest, Scenario
from simulation.universe import Universe

# Bits of the memory of one dead engine.
_MOST_FLIPS = 8

# An engine is attached, and a gateway has a link to it, after this time without a disturbance, beside late messages.
_SETTLE_SECONDS = 5.0
_LATE_MESSAGES = 20


class Witness:
    """Watches what may be a reason for a failure."""

    def __init__(self, universe: Universe, scenario: Scenario) -> None:
        self.lost: Counter[str] = Counter()  # blocks of each engine id that audits have withheld, and seals may have
        self._universe = universe
        self._scenario = scenario
        self._engines: list[EngineProcess] = []  # also those that have ended
        latency = scenario.latency
        self._settled_seconds = _SETTLE_SECONDS + (_LATE_MESSAGES * latency.late if latency.late_share else 0.0)

    def add(self, engine: EngineProcess) -> None:
        """Watch an engine."""
        self._engines.append(engine)

    @property
    def failed_steps(self) -> int:
        """Number of steps that were made to fail."""
        return sum(engine.runner.failed_steps for engine in self._engines)

    def circumstances(self, outcome: Outcome, gateway: GatewayProcess) -> Circumstances:
        """Return the circumstances of a request that fails now."""
        request, scenario, now = outcome.request, self._scenario, self._universe.now
        queues = [one.limits.max_waiting for one in scenario.engines]
        bounds = [*queues, *(one.requests for one in scenario.gateways)]
        engines = [one for one in self._universe.processes if isinstance(one, EngineProcess)]
        lost = self._lost_blocks()
        return Circumstances(
            seconds=now - outcome.begun,
            received=any(outcome.tokens),
            failed_steps=self.failed_steps - outcome.failed_steps,
            lost_engines=gateway.lost_engines[request.name] - outcome.lost_engines,
            gateway_ends=gateway.ending,
            withheld=any(lost.values()),
            fits=all(
                self._surely_fits(request, size, lost[f"e{number}"]) for number, size in enumerate(scenario.engines)
            ),
            has_bounds=min(bounds) < sum(max(one.samples, one.beams) for one in scenario.requests),
            able=[
                one.name
                for one in engines
                if self._is_able(gateway, one) and self._surely_fits(request, one.size, lost[one.name])
            ],
        )

    def _lost_blocks(self) -> Counter[str]:
        """Return how many device blocks one process of each engine id may have lost, at most."""
        lost = Counter[str]()
        for engine in self._engines:
            condemned = sum(not host for _, host, _ in engine.proof.condemned) if engine.proof else 0
            flipped = engine.shared.flipped_seals if engine.shared else 0
            lost[engine.name] = max(lost[engine.name], self.lost[engine.name] + condemned + flipped)
        return lost

    @property
    def condemned(self) -> int:
        """Number of blocks that were found wrong."""
        return sum(sum(one.proof.counts.wrong.values()) for one in self._engines if one.proof)

    def _is_able(self, gateway: GatewayProcess, engine: EngineProcess) -> bool:
        """Return whether a gateway reaches an engine without a bound that has been kept from nothing for a while."""
        if engine.ending or engine.exit or engine.size.limits.max_waiting < len(self._scenario.requests):
            return False
        if not self._universe.network.reaches(gateway.loop, address_of(engine.name), engine.loop):
            return False
        if self._has_other_process(engine):  # to which the gateway may have its link
            return False
        troubles = self._universe.disturbances
        managers = [one for one in self._universe.processes if isinstance(one, ManagerProcess)]
        since = max(troubles.of(one) for one in (gateway, engine, *managers))
        since = max(since, troubles.between(gateway, engine), troubles.of_client(engine))
        return self._universe.now - since > self._settled_seconds

    def _has_other_process(self, engine: EngineProcess) -> bool:
        others = [one for one in self._universe.processes if isinstance(one, EngineProcess) and one is not engine]
        return any(one.name == engine.name and not one.exit for one in others)

    def _surely_fits(self, request: PlannedRequest, size: EngineSize, lost: int) -> bool:
        """Return whether an engine that has lost blocks can serve a request, even if its sequences share nothing."""
        tokens = len(request.prompt) + request.max_tokens
        blocks = request.samples * (1 + blocks_for(tokens, size.block_size))
        fits = tokens <= size.context_tokens and blocks <= size.device_blocks - lost
        for kind in size.windows:
            most = kind.most_blocks(max(size.limits.token_budget, size.block_size), size.block_size)
            shared = request.samples > 1  # a sample that is behind holds what all share
            own = min(1 + blocks_for(tokens, size.block_size), most)
            fits = fits and (request.samples + shared) * own <= kind.device_blocks - lost
        return fits and request.samples <= size.limits.max_sequences


class BitFlips:
    """The flips of a scenario. `count` is their number."""

    def __init__(self, universe: Universe) -> None:
        self.count = 0
        self._universe = universe
        self._random: Random = universe.random
        self._awaited: set[EngineProcess] = set()  # whose next swapped sequence gets a flipped bit

    def flip(self, what: str, engine: EngineProcess) -> bool:
        """Flip bits of an engine; return whether it is to be killed, because its memory has them when it is dead."""
        if what == "a cached block of an engine":
            self._note(engine, engine.flip_cached_block(self._random))
        elif what == "a host block of an engine":
            self._note(engine, engine.flip_host_block(self._random, held=False))
            self._awaited.add(engine)
        elif engine.shared is not None and engine.size.compares:
            engine.shared.flips_due = self._random.randint(1, _MOST_FLIPS)
            self.count += engine.shared.flips_due
            return True
        return False

    def after_event(self, engine: EngineProcess) -> None:
        """Flip a bit of a host block that a sequence holds, as soon as there is one."""
        if engine in self._awaited and (words := engine.flip_host_block(self._random, held=True)):
            self._note(engine, words)
            self._awaited.remove(engine)

    def _note(self, engine: EngineProcess, words: str) -> None:
        if words:
            self.count += 1
            self._universe.note(engine.name, f"has a flipped bit in {words}")
