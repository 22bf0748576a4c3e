"""One simulation: a scenario in a universe, and what must be true after every event and at the end."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from quire.v1 import gateway_pb2
from services.runtime.errors import DeadlineExceeded, Overloaded, RepeatedEngineLoss, ServiceError, Unavailable
from services.runtime.errors import InvalidField
from simulation.processes import STOP, VOCABULARY, EngineProcess, GatewayProcess, ManagerProcess, Process
from simulation.scenario import SECONDS, PlannedFault, PlannedRequest, Scenario
from simulation.universe import Universe
from tests.engine.fake_runner import expected_tokens

# Virtual time before the load, and in which everything must have ended after the last fault.
_START_SECONDS = 3.0
_LONGEST_STOP_SECONDS = 12.0
_REST_SECONDS = 120.0


class Violation(Exception):
    """Something that must be true is not."""


@dataclass
class Outcome:
    """What a client received: the tokens of each sample, and how its request ended; None if it has not."""

    request: PlannedRequest
    begun: float
    tokens: list[list[int]] = field(default_factory=list)
    end: str | None = None


class Simulation:
    """Runs a scenario. `run` raises Violation."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.universe = Universe(Random(scenario.order), folder, scenario.latency)
        self.outcomes: list[Outcome] = []
        self.begun = self.universe.now + _START_SECONDS
        self._manager = self.universe.start_manager(scenario.lease_seconds)
        self._engines = [self._start_engine(number) for number in range(scenario.engines)]
        self._gateways = [self._start_gateway(number) for number in range(scenario.gateways)]
        self._planned = sorted(
            [(one.at, partial(self._submit, one)) for one in scenario.requests]
            + [(one.at, partial(self._fault, one)) for one in scenario.faults],
            key=lambda pair: pair[0],
        )

    def run(self) -> None:
        """Run the scenario to its end. Raises Violation."""
        universe = self.universe
        universe.run(self.begun, self._check)
        for at, act in self._planned:
            universe.run(self.begun + at, self._check)
            act()
        universe.run(self.begun + SECONDS + _LONGEST_STOP_SECONDS, self._check)
        end = universe.now + _REST_SECONDS
        while universe.now < end and not self._at_rest():
            universe.run(universe.now + 1.0, self._check)
        self._check_rest()

    # What happens from outside.

    def _start_engine(self, number: int) -> EngineProcess:
        return self.universe.start_engine(f"e{number}", self.scenario.sizes[number])

    def _start_gateway(self, number: int) -> GatewayProcess:
        return self.universe.start_gateway(f"g{number}", [f"e{one}" for one in range(self.scenario.engines)])

    def _submit(self, request: PlannedRequest) -> None:
        gateway = self._gateways[request.gateway]
        outcome = Outcome(request, self.universe.now, [[] for _ in range(request.samples)])
        self.outcomes.append(outcome)
        self.universe.note(gateway.name, f"receives {request.name}: {len(request.prompt)} tokens")
        gateway.start(self._client(gateway, outcome))

    async def _client(self, gateway: GatewayProcess, outcome: Outcome) -> None:
        request = outcome.request
        try:
            async with asyncio.timeout(request.cancel_after):
                async for response in gateway.handler.generate(_message(request)):
                    if response.HasField("delta"):
                        outcome.tokens[response.delta.sample] += response.delta.token_ids
            outcome.end = "finished"
        except TimeoutError:
            outcome.end = "cancelled"
        except ServiceError as error:
            outcome.end = f"{type(error).__name__}: {error}"
        self.universe.note(gateway.name, f"{request.name} ends: {outcome.end}")

    def _fault(self, fault: PlannedFault) -> None:
        verb, _, what = fault.kind.partition(" ")
        match verb:
            case "kill":
                self._kill(what, fault.number)
            case "stop":
                if not (process := self._named(what, fault.number)).stopped:
                    self.universe.stop(process, abs(fault.seconds))
            case "cut":
                self.universe.cut(self._named(what, fault.number))
            case "silence":
                self._silence(self._named(what, fault.number), abs(fault.seconds))
            case "a":
                self._start_second(what, fault.number)
            case "step":
                self.universe.wall_offset += fault.seconds
                self.universe.note("clock", f"the wall clock steps by {fault.seconds} s")

    def _kill(self, what: str, number: int) -> None:
        process = self._named(what, number)
        self.universe.kill(process)
        self._replace(process)

    def _replace(self, process: Process) -> None:
        """Start a killed process again."""
        if isinstance(process, ManagerProcess):
            self._manager = self.universe.start_manager(self.scenario.lease_seconds)
        elif isinstance(process, EngineProcess):
            number = int(process.name[1:])
            self._engines[number] = self._start_engine(number)
        elif isinstance(process, GatewayProcess):
            for outcome in self.outcomes:
                if outcome.end is None and self._gateways[outcome.request.gateway] is process:
                    outcome.end = "the gateway was killed"
            number = int(process.name[1:])
            self._gateways[number] = self._start_gateway(number)

    def _start_second(self, what: str, number: int) -> None:
        """Start a process beside its predecessor, which lives on for a while without an address."""
        if what == "second manager":
            self._manager = self.universe.start_manager(self.scenario.lease_seconds)
        else:
            number %= len(self._engines)
            self._engines[number] = self._start_engine(number)

    def _silence(self, process: Process, seconds: float) -> None:
        """Lose what a connection of a process carries, until both sides notice."""
        for connection in list(self.universe.network.open_connections(process.loop))[:1]:
            self.universe.note(process.name, "has a connection that carries nothing")
            connection.silent = True
            self.universe.network.deliver_in(15.0 + seconds, connection.cut)

    def _named(self, what: str, number: int) -> Process:
        if "manager" in what:
            return self._manager
        if "engine" in what:
            return self._engines[number % len(self._engines)]
        return self._gateways[number % len(self._gateways)]

    # What must be true.

    def _check(self) -> None:
        for process in self.universe.processes:
            if process.loop.failures:
                raise Violation(f"{process.name}: {process.loop.failures[0]}")
        for session in self._manager.manager.sessions():
            if not session.stepping and (faults := session.pool.violations()):
                raise Violation(f"pool of {session.pool.spec.engine_id}: {faults[0]}")

    def _at_rest(self) -> bool:
        return all(outcome.end is not None for outcome in self.outcomes) and all(
            engine.scheduler.empty for engine in self._engines
        )

    def _check_rest(self) -> None:
        for outcome in self.outcomes:
            self._check_outcome(outcome)
        for engine in self._engines:
            if not engine.scheduler.empty:
                raise Violation(f"{engine.name} still has requests")
        for session in self._manager.manager.sessions():
            if held := session.pool.device.counts.held:
                raise Violation(f"{held} blocks of {session.pool.spec.engine_id} are held at rest")

    def _check_outcome(self, outcome: Outcome) -> None:
        request = outcome.request
        if outcome.end is None:
            raise Violation(f"{request.name} has not ended")
        for sample, tokens in enumerate(outcome.tokens):
            expected = expected_tokens(request.prompt, request.seed, request.max_tokens, STOP, VOCABULARY, sample)
            whole = tokens == expected or tokens == [one for one in expected if one not in STOP]
            if tokens != expected[: len(tokens)] or (outcome.end == "finished" and not whole):
                raise Violation(f"{request.name}, sample {sample}: {tokens} in place of {expected}")


def _message(request: PlannedRequest) -> gateway_pb2.GenerateRequest:
    message = gateway_pb2.GenerateRequest(request_id=request.name)
    message.prompt.token_ids.ids.extend(request.prompt)
    message.stopping.max_tokens = request.max_tokens
    message.sampling.seed = request.seed
    message.sampling.sample_count = request.samples
    message.sampling.temperature = 1.0
    if request.timeout is not None:
        message.timeout.FromNanoseconds(int(request.timeout * 1e9))
    return message


