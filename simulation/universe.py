"""All processes of a simulation, and the order of what happens: one event at a time, chosen by a seed."""

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol, TypeVar

from simulation.disturbances import Disturbances
from simulation.invariants.expected_contents import ExpectedContents
from simulation.network.connections import Connection, Latency, Network
from simulation.processes.attached import EngineSize, Incarnation
from simulation.processes.engine import EngineProcess
from simulation.processes.gateway import GatewayLimits, GatewayProcess
from simulation.processes.kept import KilledInside, SharedMemory
from simulation.processes.manager import ManagerLimits, ManagerProcess
from simulation.processes.process import Process
from simulation.processes.steps import StepsPlan, StepsProcess

_Process = TypeVar("_Process", bound=Process)

# The time that passes with each event, at most.
_EVENT_SECONDS = 20e-6
_BEGIN = 1000.0
# Of a connection that is to be silent: it ends in a handshake of an engine, or of a gateway.
_FIRST_MESSAGES = (1, 1, 2, 3, 8)
# Virtual time before the load: the story and the scenario count from there.
START_SECONDS = 3.0


class Event(NamedTuple):
    """Something that happened, for the story. `at` is in seconds since the load began."""

    at: float
    process: str
    words: str


class Check(Protocol):
    """Checks what must be true."""

    def after_event(self, process: Process | None) -> None:
        """Check after an event of a process; None: after a delivery."""

    def at_rest(self) -> None:
        """Check where no process can run before time passes."""


class Universe:
    """Runs events one at a time. `random` chooses among what can happen now; time passes where nothing can.

    `events` counts delivered messages, turns of engines and callbacks of loops, but no timers: a universe in which
    nothing is done has none.
    """

    def __init__(self, random: Random, folder: Path, latency: Latency) -> None:
        """Start without processes. `folder` has the tokenizer of the engines' model."""
        self.random = random
        self.now = _BEGIN
        self.begun = _BEGIN + START_SECONDS
        self.events = 0
        self.story: list[Event] = []
        self.network = Network(self.clock, random, latency)
        self.processes: list[Process] = []
        self.ending: set[int] = set()  # starts of the engines that were asked to end, in nanoseconds since the boot
        self._dead: list[Process] = []
        self.disturbances = Disturbances()
        self.wall_offset = 0.0  # of the machine's wall clock, from which incarnations come
        self.kept: dict[str, SharedMemory] = {}  # by engine id
        self.store_kills = 0.0  # probability of a kill after a store to kept memory
        self._folder = folder

    def clock(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def note(self, process: str, words: str) -> None:
        """Add a line to the story."""
        self.story.append(Event(self.now - self.begun, process, words))

    # Processes.

    def start_manager(self, limits: ManagerLimits) -> ManagerProcess:
        """Start a KV manager in place of an earlier one."""
        self.note("kvmanager", "starts")
        return self._add(ManagerProcess(self.network, self.clock, self.random.getrandbits(32), limits, self.ending))

    def start_engine(self, engine_id: str, size: EngineSize, expected: ExpectedContents) -> EngineProcess:
        """Start an engine in place of an earlier one; `expected` are the contents of kept blocks."""
        incarnation, shared = self._next_incarnation(engine_id), self._shared(engine_id, size, expected)
        engine = EngineProcess(self.network, self.clock, engine_id, incarnation, size, self._folder, shared)
        if engine.flipped:
            self.note(engine_id, f"finds flipped bits in {engine.flipped}")
        return self._add(engine)

    def start_steps(self, engine_id: str, size: EngineSize, plan: StepsPlan) -> StepsProcess:
        """Start a client of the manager that sends random block steps, in place of an earlier one."""
        incarnation, shared = self._next_incarnation(engine_id), self._shared(engine_id, size, ExpectedContents())
        return self._add(StepsProcess(self.network, self.clock, engine_id, incarnation, size, plan, shared))

    def _shared(self, engine_id: str, size: EngineSize, expected: ExpectedContents) -> SharedMemory | None:
        """Return the memory of an engine id, None if it keeps none, or if a process that lives has it."""
        if not size.keeps:
            return None
        if engine_id not in self.kept:
            self.kept[engine_id] = SharedMemory(size, expected, self.random, self.store_kills)
        shared = self.kept[engine_id]
        return None if id(shared.owner) in map(id, self.processes) else shared

    def _next_incarnation(self, engine_id: str) -> Incarnation:
        incarnation = Incarnation(int((self.now + self.wall_offset) * 1e9), int(self.now * 1e9))
        self.note(engine_id, f"starts as incarnation {incarnation.number}")
        return incarnation

    def start_gateway(self, name: str, engines: Iterable[str], limits: GatewayLimits) -> GatewayProcess:
        """Start a gateway of these engines."""
        self.note(name, "starts")
        return self._add(GatewayProcess(self.network, self.clock, name, engines, limits))

    def _add(self, process: _Process) -> _Process:
        self.processes.append(process)
        self.disturbances.add(process, self.now)
        return process

    # Faults.

    def end_store_kills(self) -> None:
        """Kill no more processes between their stores."""
        self.store_kills = 0.0
        for shared in self.kept.values():
            shared.kills = 0.0

    def kill(self, process: Process, words: str = "is killed") -> None:
        """Kill a process: nothing of it runs again, and its connections break."""
        self.note(process.name, words)
        connections = list(self.network.open_connections(process.loop))
        process.loop.kill()
        self.processes.remove(process)
        self._dead.append(process)
        for connection in connections:
            self._cut(connection)

    def close(self) -> None:
        """End all processes."""
        for process in (*self.processes, *self._dead):
            process.loop.kill()
            process.loop.close_coroutines()

    def stop(self, process: Process, seconds: float) -> None:
        """Stop a process for a time, as SIGSTOP and SIGCONT do."""
        self.note(process.name, f"is stopped for {seconds:.3f} s")
        process.stopped, process.continues_at = True, self.now + seconds
        process.stopped_seconds += seconds
        self.disturbances.add(process, process.continues_at)

        def revive() -> None:
            self.note(process.name, "continues")
            process.stopped = False

        self.network.deliver_in(seconds, revive)

    def cut(self, process: Process) -> None:
        """Break one connection of a process."""
        connections = list(self.network.open_connections(process.loop))
        if connections:
            self.note(process.name, "loses a connection")
            self._cut(self.random.choice(connections))

    def silence(self, process: Process, seconds: float) -> None:
        """Lose what one connection of a process carries from now on; it breaks after this time."""
        connections = list(self.network.open_connections(process.loop))
        if connections:
            connection = self.random.choice(connections)
            self.note(process.name, f"has a connection that carries nothing, and breaks after {seconds:.1f} s")
            connection.silence()
            self.network.deliver_in(seconds, connection.cut)
            self.disturbances.add_connection(connection, self.now + seconds)

    def silence_next(self, process: Process, seconds: float) -> None:
        """Break the connections that a process has made; the next one soon carries nothing, and breaks later."""
        messages = self.random.choice(_FIRST_MESSAGES)
        words = f"the next one carries {messages} messages, then nothing, and breaks after {seconds:.1f} s"
        self.note(process.name, f"loses its connections; {words}")
        for connection in list(self.network.open_connections(process.loop)):
            if connection.client is process.loop:
                self._cut(connection)

        def soon_silent(connection: Connection) -> None:
            connection.messages_left = messages
            self.network.deliver_in(seconds, connection.cut)
            self.disturbances.add_connection(connection, self.now + seconds)

        self.network.on_next(process.loop, soon_silent)
        self.disturbances.add_next(process.loop, self.now + seconds)

    def _cut(self, connection: Connection) -> None:
        self.disturbances.add_connection(connection, self.now)
        connection.cut()

    # Events.

    def run(self, until: float, check: "Check") -> None:
        """Run events until a time, checking after each, and whenever nothing can run."""
        while True:
            able = [
                one
                for one in self.processes
                if not one.stopped and (one.loop.has_ready() or one.thread_can_run(self.now))
            ]
            delivery = self.network.next_delivery()
            due = delivery is not None and delivery <= self.now
            if able or due:
                check.after_event(self._run_one(able, due))
                continue
            check.at_rest()
            if not self._pass_time(until):
                return

    def _run_one(self, able: list[Process], due: bool) -> Process | None:
        self.now += self.random.random() * _EVENT_SECONDS
        chosen = self.random.randrange(len(able) + due)
        if chosen == len(able):
            self.events += 1
            self.network.deliver_one()
            return None
        process = able[chosen]
        if process.loop.has_ready() and not (process.thread_can_run(self.now) and self.random.random() < 0.5):
            self.events += process.loop.run_one()
        else:
            self.events += 1
            _run_thread(process)
        return process

    def _pass_time(self, until: float) -> bool:
        """Let time pass until something can happen; return whether that is before `until`."""
        times = [self.network.next_delivery()]
        for process in self.processes:
            if not process.stopped:
                times += [process.loop.next_timer(), process.thread_wakes_at()]
        soonest = min((one for one in times if one is not None), default=until)
        if soonest >= until:
            self.now = until
            return False
        self.now = max(self.now, soonest)
        return True


def _run_thread(process: Process) -> None:
    """Run the thread of a process; an exception of it ends the process."""
    try:
        process.run_thread()
    except KilledInside:
        process.killed_inside = True
    except Exception as error:
        process.loop.failures.append(f"its thread ends: {error!r}")
