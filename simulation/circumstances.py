"""Collects the circumstances in which a request fails."""

from blocks import blocks_for
from simulation.invariants.failures import Circumstances
from simulation.invariants.requests import Outcome
from simulation.processes.attached import EngineSize
from simulation.processes.engine import EngineProcess, address_of
from simulation.processes.gateway import GatewayProcess
from simulation.processes.manager import ManagerProcess
from simulation.runner import DigestRunner
from simulation.scenario import PlannedRequest, Scenario
from simulation.universe import Universe

# An engine is attached, and a gateway has a link to it, after this time without a disturbance, beside late messages.
_SETTLE_SECONDS = 5.0
_LATE_MESSAGES = 20


class Witness:
    """Watches what may be a reason for a failure."""

    def __init__(self, universe: Universe, scenario: Scenario) -> None:
        self.withheld = False
        self._universe = universe
        self._scenario = scenario
        self._runners: list[DigestRunner] = []  # also of engines that have ended
        latency = scenario.latency
        self._settled_seconds = _SETTLE_SECONDS + (_LATE_MESSAGES * latency.late if latency.late_share else 0.0)

    def add(self, runner: DigestRunner) -> None:
        """Watch the steps of an engine."""
        self._runners.append(runner)

    @property
    def failed_steps(self) -> int:
        """Number of steps that were made to fail."""
        return sum(runner.failed_steps for runner in self._runners)

    def circumstances(self, outcome: Outcome, gateway: GatewayProcess) -> Circumstances:
        """Return the circumstances of a request that fails now."""
        request, scenario, now = outcome.request, self._scenario, self._universe.now
        queues = [one.limits.max_waiting for one in scenario.engines]
        bounds = [*queues, *(one.requests for one in scenario.gateways)]
        engines = [one for one in self._universe.processes if isinstance(one, EngineProcess)]
        return Circumstances(
            seconds=now - outcome.begun,
            received=any(outcome.tokens),
            failed_steps=self.failed_steps - outcome.failed_steps,
            lost_engines=gateway.lost_engines[request.name] - outcome.lost_engines,
            gateway_ends=gateway.ending,
            withheld=self.withheld,
            fits=all(self._surely_fits(request, size) for size in scenario.engines),
            has_bounds=min(bounds) < sum(max(one.samples, one.beams) for one in scenario.requests),
            able=[one.name for one in engines if self._is_able(gateway, one) and self._surely_fits(request, one.size)],
        )

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

    def _surely_fits(self, request: PlannedRequest, size: EngineSize) -> bool:
        """Return whether an engine can serve a request, even if its sequences share nothing."""
        if self.withheld:  # any pool may be smaller
            return False
        tokens = len(request.prompt) + request.max_tokens
        blocks = request.samples * (1 + blocks_for(tokens, size.block_size))
        fits = tokens <= size.context_tokens and blocks <= size.device_blocks
        for kind in size.windows:
            most = kind.most_blocks(size.limits.token_budget, size.block_size)
            own = min(1 + blocks_for(tokens, size.block_size), most)
            fits = fits and request.samples * own <= kind.device_blocks
        return fits and request.samples <= size.limits.max_sequences
