"""All processes of a simulation, and the order of what happens: one event at a time, chosen by a seed."""

from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

from simulation.network import Latency, Network
from simulation.processes import EngineProcess, GatewayProcess, ManagerProcess, PoolSize, Process

_Process = TypeVar("_Process", bound=Process)

# The time that passes with each event, at most.
_EVENT_SECONDS = 20e-6


class Event(NamedTuple):
    """Something that happened, for the story."""

    at: float
    process: str
    words: str


class Universe:
    """Runs events one at a time. `random` chooses among what can happen now; time passes where nothing can."""

    def __init__(self, random: Random, folder: Path, latency: Latency = Latency()) -> None:  # noqa: B008
        self.random = random
        self.now = 1000.0
        self.events = 0
        self.story: list[Event] = []
        self.network = Network(self.clock, random, latency)
        self._folder = folder
        self.processes: list[Process] = []
        self.wall_offset = 0.0  # of the machine's wall clock, from which incarnations come
        self._last_incarnation = 0

    def clock(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def note(self, process: str, words: str) -> None:
        """Add a line to the story."""
        self.story.append(Event(self.now, process, words))

    # Processes.

    def start_manager(self, lease_seconds: float = 10.0) -> ManagerProcess:
        """Start a KV manager in place of an earlier one."""
        self.note("kvmanager", "starts")
        return self._add(ManagerProcess(self.network, self.clock, self.random.getrandbits(32), lease_seconds))

    def start_engine(self, engine_id: str, size: PoolSize) -> EngineProcess:
        """Start an engine in place of an earlier one."""
        incarnation = int((self.now + self.wall_offset) * 1e9)
        self.note(engine_id, f"starts as incarnation {incarnation}")
        return self._add(EngineProcess(self.network, self.clock, engine_id, incarnation, size, self._folder))

    def start_gateway(self, name: str, engines: Iterable[str]) -> GatewayProcess:
        """Start a gateway of these engines."""
        self.note(name, "starts")
        addresses = ",".join(f"{one}:1" for one in engines)
        return self._add(GatewayProcess(self.network, self.clock, name, addresses))

    def _add(self, process: _Process) -> _Process:
        self.processes.append(process)
        return process

    # Faults.

    def kill(self, process: Process) -> None:
        """Kill a process: nothing of it runs again, and its connections break."""
        self.note(process.name, "is killed")
        connections = list(self.network.open_connections(process.loop))
        process.loop.kill()
        self.processes.remove(process)
        for connection in connections:
            connection.cut()

    def stop(self, process: Process, seconds: float) -> None:
        """Stop a process for a time."""
        self.note(process.name, f"is stopped for {seconds:.3f} s")
        process.stopped = True

        def revive() -> None:
            self.note(process.name, "continues")
            process.stopped = False

        self.network.deliver_in(seconds, revive)

    def cut(self, process: Process) -> None:
        """Break one connection of a process."""
        connections = list(self.network.open_connections(process.loop))
        if connections:
            connection = self.random.choice(connections)
            self.note(process.name, "loses a connection")
            connection.cut()

    # Events.

    def step(self, until: float) -> bool:
        """Run one event, letting time pass until one can. Return False if there is none before `until`."""
        while True:
            able = [one for one in self.processes if not one.stopped and (one.loop.has_ready() or one.can_run(self.now))]
            delivery = self.network.next_delivery()
            due = delivery is not None and delivery <= self.now
            if able or due:
                self._run_one(able, due)
                return True
            if not self._pass_time(until):
                return False

    def run(self, until: float, after: Callable[[], None]) -> None:
        """Run events until a time; call `after` behind each."""
        while self.step(until):
            after()

    def _run_one(self, able: list[Process], due: bool) -> None:
        self.events += 1
        self.now += self.random.random() * _EVENT_SECONDS
        chosen = self.random.randrange(len(able) + due)
        if chosen == len(able):
            self.network.deliver_one()
            return
        process = able[chosen]
        ready, can_run = process.loop.has_ready(), process.can_run(self.now)
        if ready and not (can_run and self.random.random() < 0.5):
            process.loop.run_one()
        else:
            process.run()

    def _pass_time(self, until: float) -> bool:
        times = [self.network.next_delivery()]
        for process in self.processes:
            if not process.stopped:
                times += [process.loop.next_timer(), process.next_wake()]
        soonest = min((one for one in times if one is not None), default=until)
        if soonest >= until:
            self.now = until
            return False
        self.now = max(self.now, soonest)
        return True
