"""Until when processes, and the connections between them, were kept from working."""

from simulation.event_loop import SimulatedLoop
from simulation.network.connections import Connection
from simulation.processes.process import Process


class Disturbances:
    """The times of the latest starts, stops, cuts and silences. Times may be in the future."""

    def __init__(self) -> None:
        self.last = 0.0
        self._processes: dict[Process, float] = {}
        self._clients: dict[SimulatedLoop, float] = {}
        self._next: dict[SimulatedLoop, float] = {}  # of clients, to a server that they choose
        self._connections: dict[tuple[SimulatedLoop, SimulatedLoop], float] = {}  # from a client to a server

    def add(self, process: Process, until: float) -> None:
        """Record that a process does not work before a time."""
        self._processes[process] = max(until, self.of(process))
        self.last = max(self.last, until)

    def add_connection(self, connection: Connection, until: float) -> None:
        """Record that a connection does not carry, or breaks, until a time."""
        ends = connection.client, connection.server
        self._connections[ends] = max(until, self._connections.get(ends, 0.0))
        self._add_client(connection.client, until)

    def add_next(self, client: SimulatedLoop, until: float) -> None:
        """Record that the next connection of a client, to any server, does not carry until a time."""
        self._next[client] = max(until, self._next.get(client, 0.0))
        self._add_client(client, until)

    def _add_client(self, client: SimulatedLoop, until: float) -> None:
        self._clients[client] = max(until, self._clients.get(client, 0.0))
        self.last = max(self.last, until)

    def of(self, process: Process) -> float:
        """Return until when a process was started or stopped."""
        return self._processes.get(process, 0.0)

    def of_client(self, client: Process) -> float:
        """Return until when any connection that a process has made was disturbed."""
        return self._clients.get(client.loop, 0.0)

    def between(self, client: Process, server: Process) -> float:
        """Return until when the connections of a client to a server were, or may have been, disturbed."""
        return max(self._connections.get((client.loop, server.loop), 0.0), self._next.get(client.loop, 0.0))
