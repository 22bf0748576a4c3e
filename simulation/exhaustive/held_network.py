"""A network that delivers nothing by itself: which message arrives next is a choice."""

from collections import deque
from collections.abc import Callable
from random import Random
from typing import NamedTuple

from quire.v1.kvmanager_pb2 import PoolRequest, PoolResponse
from simulation.event_loop import SimulatedLoop
from simulation.exhaustive.structure import digest_of
from simulation.network.connections import Connection, Delivery, DeliveryKind, Latency, Network, Server, Status


class ConnectionName(NamedTuple):
    """A connection: its client, which of the client's connections it is, from 1, and its server."""

    client: str
    number: int
    server: str

    def __str__(self) -> str:
        return f"{self.client}'s connection {self.number} to {self.server}"


class QueueName(NamedTuple):
    """One of the queues of a connection."""

    connection: ConnectionName
    kind: DeliveryKind

    @property
    def reader(self) -> str:
        """The process that receives what the queue carries."""
        is_client = self.kind in (DeliveryKind.RESPONSES, DeliveryKind.LOST)
        return self.connection.client if is_client else self.connection.server


class Held(NamedTuple):
    """Something that can be delivered, and a digest of it. `contents` is a message, or a text for people."""

    action: Callable[[], None]
    contents: bytes | Status | str | None
    digest: bytes = b""

    def words(self, kind: DeliveryKind) -> str:
        """Return what it is, for people, in a queue of this kind."""
        match self.contents:
            case None:
                return "the end of the requests"
            case Status(code=code, details=details):
                return f"the status {code.name} {details}".rstrip()
            case bytes() as data:
                message = PoolRequest if kind is DeliveryKind.REQUESTS else PoolResponse
                return str(message.FromString(data).WhichOneof("kind"))
            case str() as text:
                return text


class NamedConnection(Connection):
    """A connection with a name."""

    def __init__(self, network: Network, client: SimulatedLoop, service: Server, name: ConnectionName) -> None:
        super().__init__(network, client, service)
        self.name = name


class HeldNetwork(Network):
    """Holds what is sent in queues, in the order in which it was sent. `labels` has the process of each loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock, Random(0), Latency())
        self.labels: dict[SimulatedLoop, str] = {}
        self.queues: dict[QueueName, deque[Held]] = {}
        self._sent: list[tuple[QueueName, bytes]] = []
        self._broken_before = frozenset[ConnectionName]()
        self.connections: dict[ConnectionName, NamedConnection] = {}

    def connect(self, client: SimulatedLoop, address: str) -> Connection | None:
        """Connect to the living server at an address, if there is one."""
        server = self._servers.get(address)
        if server is None or server.loop.dead:
            return None
        label = self.labels[client]
        name = ConnectionName(label, self.made_by(label) + 1, self.labels[server.loop])
        connection = self.connections[name] = NamedConnection(self, client, server, name)
        self._connections.append(connection)
        return connection

    def made_by(self, client: str) -> int:
        """Return how many connections a process has made."""
        return sum(name.client == client for name in self.connections)

    def deliver_after(
        self, earliest: float, delivery: Delivery, action: Callable[[], None], most: float | None = None
    ) -> float:
        """Hold an action, behind the others of its queue."""
        del earliest, most
        assert isinstance(delivery.connection, NamedConnection), "`connect` makes no other"
        name, contents = QueueName(delivery.connection.name, delivery.kind), delivery.contents
        held = Held(action, contents, b"" if isinstance(contents, str) else digest_of(contents))
        self.queues.setdefault(name, deque()).append(held)
        self._sent.append((name, held.digest))
        return 0.0

    def deliver(self, name: QueueName) -> Held:
        """Run the first action of a queue, and return it."""
        held = self.queues[name].popleft()
        if not self.queues[name]:
            del self.queues[name]
        held.action()
        return held

    def forget_changes(self) -> None:
        """Begin a new list of changes."""
        self._sent.clear()
        self._broken_before = self.broken()

    def changes(self) -> tuple[tuple[tuple[QueueName, bytes], ...], frozenset[ConnectionName]]:
        """Return what was sent, and which connections were broken, since `forget_changes`."""
        return tuple(self._sent), self.broken() - self._broken_before

    def broken(self) -> frozenset[ConnectionName]:
        """Return the connections that are broken."""
        return frozenset(name for name, one in self.connections.items() if one.broken)
