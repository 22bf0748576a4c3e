"""One simulation: a scenario in a universe, and what must be true after every event and at the end."""

import asyncio
from functools import partial
from pathlib import Path
from random import Random

from blocks import root_key
from kvmanager import Session
from quire.v1 import gateway_pb2
from services.runtime.errors import ServiceError
from simulation.circumstances import BitFlips, Witness
from simulation.invariants.bounds import Bounds
from simulation.invariants.engines import sleep_faults
from simulation.invariants.errors_logged import ErrorsLogged
from simulation.invariants.expected_contents import ExpectedContents
from simulation.invariants.marks import mark_faults
from simulation.invariants.requests import Outcome, computed_texts
from simulation.invariants.violation import Violation
from simulation.processes.attached import FINGERPRINT, AttachedProcess
from simulation.processes.engine import EngineProcess
from simulation.processes.gateway import GatewayProcess
from simulation.processes.manager import ManagerProcess
from simulation.processes.process import Process
from simulation.processes.steps import StepsProcess
from simulation.quiet import quiet
from simulation.scenario import SECONDS, PlannedFault, PlannedRequest, Scenario
from simulation.universe import Universe

# After the end of the last fault, everything must have ended within this virtual time.
_REST_SECONDS = 120.0
# A gateway's or engine's own timeouts end a silent connection at the latest after this time.
_SILENT_SECONDS = 15.0
# Of the bits of a memory that an engine has kept, at once.


class Simulation:
    """Runs a scenario. `run` raises Violation."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.universe = Universe(Random(scenario.order), folder, scenario.latency)
        self.universe.store_kills = scenario.store_kills
        self.kills = 0
        self.flips = BitFlips(self.universe)
        self._outcomes: list[Outcome] = []
        self._expected = ExpectedContents()
        self._witness = Witness(self.universe, scenario)
        self._bounds = Bounds(self.universe, scenario.latency)
        self._checked_steps: dict[AttachedProcess, int] = {}
        self._checked_pools: dict[Session, int] = {}  # their last block steps
        self._errors = ErrorsLogged()
        self._manager = self.universe.start_manager(scenario.manager)
        self._engines = [self._start_engine(number) for number in range(len(scenario.engines))]
        self._steps = [self._start_steps(number) for number in range(len(scenario.steps))]
        self._gateways = [self._start_gateway(number) for number in range(len(scenario.gateways))]
        self._planned = sorted(
            [(one.at, partial(self._submit, one)) for one in scenario.requests]
            + [(one.at, partial(self._fault, one)) for one in scenario.faults],
            key=lambda pair: pair[0],
        )

    def run(self) -> None:
        """Run the scenario to its end. Raises Violation."""
        with quiet(), self._errors:
            try:
                self._run()
            finally:
                self.universe.close()

    def _run(self) -> None:
        universe = self.universe
        universe.run(universe.begun, self)
        for at, act in self._planned:
            universe.run(universe.begun + at, self)
            act()
        universe.run(universe.begun + SECONDS, self)
        while universe.now < universe.disturbances.last:  # a connection made late may be disturbed for longer
            universe.run(universe.disturbances.last, self)
        universe.end_store_kills()
        for process in universe.processes:
            if isinstance(process, StepsProcess):  # also one beside which a second one was started
                process.finish()
        end = universe.now + _REST_SECONDS
        while universe.now < end and not self._has_ended():
            universe.run(universe.now + 1.0, self)
        self._check_end()

    @property
    def condemned(self) -> int:
        """Number of blocks that engines have condemned."""
        return self._witness.condemned

    # What happens from outside.

    def _start_engine(self, number: int) -> EngineProcess:
        engine = self.universe.start_engine(f"e{number}", self.scenario.engines[number], self._expected)
        self._witness.add(engine)
        return engine

    def _start_steps(self, number: int) -> StepsProcess:
        return self.universe.start_steps(f"s{number}", *self.scenario.steps[number])

    def _start_gateway(self, number: int) -> GatewayProcess:
        engines = [f"e{one}" for one in range(len(self.scenario.engines))]
        return self.universe.start_gateway(f"g{number}", engines, self.scenario.gateways[number])

    def _submit(self, request: PlannedRequest) -> None:
        gateway = self._gateways[request.gateway]
        begun = max(self.universe.now, gateway.continues_at)
        outcome = Outcome(request, begun, gateway.stopped_seconds, self._witness.failed_steps)
        self._outcomes.append(outcome)
        root_of = partial(root_key, FINGERPRINT, request.salt.encode())
        for text in computed_texts(request):
            self._expected.add_requested(root_of, [*request.prompt, *text])
        self.universe.note(gateway.name, f"receives {request.name}: {len(request.prompt)} tokens")
        gateway.start(self._client(gateway, outcome))

    async def _client(self, gateway: GatewayProcess, outcome: Outcome) -> None:
        request = outcome.request
        try:
            async with asyncio.timeout(request.cancel_after):
                async for response in gateway.handler.generate(_message(request)):
                    outcome.add(response)
                    if response.HasField("delta"):
                        outcome.lost_engines = gateway.lost_engines[request.name]
            outcome.end = "finished"
        except TimeoutError:
            outcome.end = "cancelled"
        except ServiceError as error:
            outcome.end, outcome.error = f"{type(error).__name__}: {error}", error
            outcome.circumstances = self._witness.circumstances(outcome, gateway)
        outcome.seconds = self.universe.now - outcome.begun - (gateway.stopped_seconds - outcome.gateway_stopped)
        self._bounds.leaves(request.name, gateway)
        self.universe.note(gateway.name, f"{request.name} ends: {outcome.end}")

    def _fault(self, fault: PlannedFault) -> None:
        verb, _, what = fault.kind.partition(" ")
        process, seconds = self._named(what, fault.number), abs(fault.seconds)
        if verb in ("kill", "end", "stop", "cut", "silence", "reconnect", "start"):
            self._disturb(verb, process, seconds)
        elif verb == "flip":
            engine = self._engines[fault.number % len(self._engines)]
            if self.flips.flip(what, engine):
                self._kill(engine)
        elif verb == "fail":
            engine = self._engines[fault.number % len(self._engines)]
            self.universe.note(engine.name, "fails in its next step")
            engine.runner.fail_next = True
        elif verb == "withhold":
            self._withhold(fault.number)
        else:
            self.universe.wall_offset += fault.seconds
            self.universe.note("clock", f"the wall clock steps by {fault.seconds} s")

    def _disturb(self, verb: str, process: Process, seconds: float) -> None:
        match verb:
            case "kill":
                self._kill(process)
            case "end":
                self._end(process, seconds)
            case "stop":
                if not process.stopped:
                    self.universe.stop(process, seconds)
            case "cut":
                self.universe.cut(process)
            case "silence":
                self.universe.silence(process, _SILENT_SECONDS + seconds)
            case "reconnect":
                self.universe.silence_next(process, _SILENT_SECONDS + seconds)
            case "start":  # beside its predecessor, which lives on without an address
                self._start_again(process)

    def _kill(self, process: Process) -> None:
        self.kills += 1
        self.universe.kill(process)
        if isinstance(process, GatewayProcess):
            for outcome in self._outcomes:
                if outcome.end is None and self._gateways[outcome.request.gateway] is process:
                    outcome.end = "the gateway was killed"
                    self._bounds.leaves(outcome.request.name, process)
        self._start_again(process)

    def _end(self, process: Process, seconds: float) -> None:
        if process.ending:
            return
        if isinstance(process, EngineProcess):
            self.universe.note(process.name, f"is to end within {seconds:.2f} s")
            self.universe.ending.add(process.incarnation.started_after_boot)
            process.end(seconds)
        elif isinstance(process, GatewayProcess):
            self.universe.note(process.name, "is to end")
            process.end()

    def _start_again(self, process: Process) -> None:
        if isinstance(process, ManagerProcess):
            self._manager = self.universe.start_manager(self.scenario.manager)
        elif isinstance(process, EngineProcess):
            number = int(process.name[1:])
            self._engines[number] = self._start_engine(number)
        elif isinstance(process, StepsProcess):
            number = int(process.name[1:])
            self._steps[number] = self._start_steps(number)
        else:
            number = int(process.name[1:])
            self._gateways[number] = self._start_gateway(number)

    def _withhold(self, number: int) -> None:
        """Withhold a block, as an audit does that finds its records wrong."""
        sessions = [one for one in self._manager.manager.sessions() if not one.stepping]
        if sessions:
            pool = sessions[number % len(sessions)].pool
            of_host = pool.host.total > 0 and self.universe.random.random() < 0.3
            tier, name = (pool.host, "host block") if of_host else (pool.device, "block")
            if sum(map(bool, tier.marks.by_block)) < tier.total // 2:
                block = self.universe.random.randint(1, tier.total)
                if not tier.marks.is_withheld_or_marked(block):
                    self._witness.lost[pool.spec.engine_id] += 1
                    self.universe.note("kvmanager", f"withholds {name} {block} of {pool.spec.engine_id}")
                    pool.withhold(*(([], [block]) if of_host else ([block], [])))

    def _named(self, what: str, number: int) -> Process:
        if "engine" in what:
            owners = [*self._engines, *self._steps]
            return owners[number % len(owners)]
        return self._gateways[number % len(self._gateways)] if "gateway" in what else self._manager

    # What must be true.

    def after_event(self, process: Process | None) -> None:
        """Check after an event of a process; None: after a delivery. Raises Violation."""
        if process is None:
            return
        if process.killed_inside:
            self._kill(process)
            return
        if process.loop.failures:
            raise Violation(f"{process.name}: {process.loop.failures[0]}")
        if self._errors.found:
            raise Violation(f"{process.name} logs an error: {self._errors.found[0]}")
        if isinstance(process, ManagerProcess):
            self._check_pools(process)
        if isinstance(process, EngineProcess):
            self.flips.after_event(process)
        if process.exit:
            self._on_exit(process)

    def _on_exit(self, process: Process) -> None:
        latest = process in (*self._engines, *self._steps, *self._gateways)
        if latest and not process.ending:
            raise Violation(f"{process.name} ends, although no newer process has its id: {process.exit}")
        self.universe.kill(process, f"ends: {process.exit}")
        if latest:
            self._start_again(process)

    def _check_pools(self, process: ManagerProcess) -> None:
        """Check the pools that have changed."""
        for session in process.manager.sessions():
            pool = session.pool
            if pool.state.stepping or self._checked_pools.get(session) != pool.last_step:
                self._checked_pools[session] = pool.last_step
                if faults := [*pool.violations(), *mark_faults(pool.device), *mark_faults(pool.host)]:
                    raise Violation(f"pool of {pool.spec.engine_id}: {faults[0]}")

    def at_rest(self) -> None:
        """Check where no process can run before time passes. Raises Violation."""
        for process in self.universe.processes:
            if process.stopped:
                continue
            faults: list[str] = []
            if isinstance(process, EngineProcess) and not process.ending:
                faults = [] if process.computes else sleep_faults(process)
                if process.scheduler.empty and not process.link.replica.steps_in_flight:
                    faults += self._content_faults(process)
            elif isinstance(process, StepsProcess):
                if process.at_rest:
                    faults = self._steps_faults(process)
            elif isinstance(process, ManagerProcess):
                process.manager.check_handshakes()
                process.manager.check_leases()
                faults = process.loop.failures
            if faults:
                raise Violation(faults[0])
        if faults := self._bounds.faults():
            raise Violation(faults[0])

    def _content_faults(self, engine: EngineProcess) -> list[str]:
        if self._checked_steps.get(engine) == (steps := engine.scheduler.totals.steps):
            return []
        self._checked_steps[engine] = steps
        return _pool_faults(self.universe, engine, self._expected)

    def _steps_faults(self, process: StepsProcess) -> list[str]:
        pool = process.link.replica.pool
        if self._checked_steps.get(process) == pool.last_step:
            return []
        self._checked_steps[process] = pool.last_step
        return [*process.table_faults(), *_pool_faults(self.universe, process, process.expected)]

    def _has_ended(self) -> bool:
        return all(outcome.end is not None for outcome in self._outcomes) and not self._left_over()

    def _check_end(self) -> None:
        for outcome in self._outcomes:
            if faults := outcome.faults():
                raise Violation(faults[0])
        if left := self._left_over():
            raise Violation(left[0])

    def _left_over(self) -> list[str]:
        """Return what is left of requests and block steps. A lost stream's pool keeps its blocks for its lease."""
        engines = [one for one in self.universe.processes if isinstance(one, EngineProcess)]
        found = [f"{engine.name} still has requests" for engine in engines if not engine.scheduler.empty]
        found += [f"{one.name} still has blocks, or block steps to send" for one in self._steps if not one.done]
        for session in self._manager.manager.sessions():
            if held := session.pool.device.counts.held + session.pool.host.counts.held:
                found.append(f"{held} blocks of {session.pool.spec.engine_id} are held after all requests")
        return found


def _pool_faults(universe: Universe, process: AttachedProcess, expected: ExpectedContents) -> list[str]:
    """Return what is wrong with the cached blocks of a pool, by its owner's replica and by its manager.

    A manager that has lost the owner may have applied a block step whose answer, and so whose copies, never arrived.
    """
    replica = process.link.replica.pool
    pools = [replica]
    carrying = [one.server for one in universe.network.open_connections(process.loop) if one.carries]
    for manager in universe.processes:
        if not isinstance(manager, ManagerProcess) or not process.link.attached.is_set():
            continue
        session = manager.manager.find_session(process.name) if manager.loop in carrying else None
        if session is not None and not session.stepping:
            pool = session.pool
            if pool.spec == replica.spec and pool.last_step == replica.last_step:
                pools.append(pool)
    return [f"{process.name}: {fault}" for pool in pools for fault in expected.pool_faults(pool, process.memory)]


def violation_of(simulation: Simulation) -> Violation | None:
    """Run a simulation; return its violation, if any."""
    try:
        simulation.run()
    except Violation as violation:
        return violation
    return None


def _message(request: PlannedRequest) -> gateway_pb2.GenerateRequest:
    message = gateway_pb2.GenerateRequest(request_id=request.name, priority=request.priority)
    message.prompt.token_ids.ids.extend(request.prompt)
    message.stopping.max_tokens = request.max_tokens
    if request.stop:
        message.stopping.stop_strings.append(request.stop)
    message.sampling.sample_count = request.samples
    message.sampling.seed = request.seed  # also of a search, for which the gateway would draw one
    if request.beams:
        message.beam_search.width = request.beams
    else:
        message.sampling.temperature = 1.0
    message.cache.salt = request.salt
    if request.timeout is not None:
        message.timeout.FromNanoseconds(int(request.timeout * 1e9))
    return message
