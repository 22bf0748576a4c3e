"""Connections, their calls, and the messages under way."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import count
from random import Random
from typing import Any, NamedTuple, Protocol

import grpc

from simulation.event_loop import SimulatedLoop

_BROKEN = "the connection was closed"
# A handler is cancelled within this time after it has read the end of the requests of a broken connection.
_CANCEL_SECONDS = 0.04


class Latency(NamedTuple):
    """How long messages travel, in seconds: `usual` on average, but up to `late` for the share `late_share` of them."""

    usual: float = 0.0005
    late: float = 0.5
    late_share: float = 0.01


class Status(NamedTuple):
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    metadata: tuple[tuple[str, str | bytes], ...] = ()


_CANCELLED = Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")


class Server(Protocol):
    """What a connection leads to."""

    loop: SimulatedLoop

    def handle(self, call: "Call", path: str) -> "asyncio.Task[None]":
        """Run the handler of a call."""


class Arrival(NamedTuple):
    """An arriving message: bytes, a status, or None at the end of the requests. `path` names the gRPC method.

    `lost`: it does not arrive, because its connection is broken or silent.
    """

    sender: str
    receiver: str
    path: str
    is_response: bool
    message: bytes | Status | None
    lost: bool = False


class DeliveryKind(Enum):
    """What is delivered. Of one connection, those of different kinds arrive in any order."""

    REQUESTS = "requests"
    RESPONSES = "responses"
    LOST = "the error of the connection"
    HANDLER_LOST = "the end of the requests, at the server"
    HANDLER_CANCELLED = "the cancellation, at the server"

    __hash__ = object.__hash__  # in C

    @property
    def is_lost_with_connection(self) -> bool:
        """Whether what is under way is lost if the connection breaks."""
        return self in (DeliveryKind.REQUESTS, DeliveryKind.RESPONSES)


class Delivery(NamedTuple):
    """What an action delivers. `contents` is a message or status, or the kind in words."""

    connection: "Connection"
    kind: DeliveryKind
    contents: "bytes | Status | str | None"


class Network:
    """All connections, and the deliveries under way. The simulator runs deliveries one at a time.

    `on_arrival` receives each message that arrives or is lost, for the story.
    """

    def __init__(self, clock: Callable[[], float], random: Random, latency: Latency) -> None:
        self.clock = clock
        self._random = random
        self._latency = latency
        self._deliveries: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._servers: dict[str, Server] = {}
        self._connections: list[Connection] = []
        self._on_next: dict[SimulatedLoop, Callable[[Connection], None]] = {}
        self.on_arrival: Callable[[Arrival], None] | None = None

    def listen(self, address: str, server: Server) -> None:
        """Serve calls to this address from now on, in place of an earlier server."""
        self._servers[address] = server

    def connect(self, client: SimulatedLoop, address: str) -> "Connection | None":
        """Connect to the living server at an address, if there is one."""
        server = self._servers.get(address)
        if server is None or server.loop.dead:
            return None
        connection = Connection(self, client, server)
        self._connections.append(connection)
        if client in self._on_next:
            self._on_next.pop(client)(connection)
        return connection

    def reaches(self, client: SimulatedLoop, address: str, process: SimulatedLoop) -> bool:
        """Return whether calls of a client to an address reach this of the processes that have served there."""
        server = self._servers.get(address)
        linked = any(one.client is client and one.server is process for one in self.open_connections(client))
        return linked or (server is not None and server.loop is process)

    def on_next(self, client: SimulatedLoop, action: Callable[["Connection"], None]) -> None:
        """Run an action with the client's next connection, when it is made."""
        self._on_next[client] = action

    def deliver_after(
        self, earliest: float, delivery: Delivery, action: Callable[[], None], most: float | None = None
    ) -> float:
        """Run an action after a random delay, of `most` seconds at most, not before `earliest`; return its time.

        `delivery` is what the action delivers, for networks in which the order is a choice.
        """
        del delivery
        delay = self._delay() if most is None else self._random.random() * most
        at = max(earliest, self.clock() + delay)
        heapq.heappush(self._deliveries, (at, next(self._numbers), action))
        return at

    def deliver_in(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action after this time."""
        heapq.heappush(self._deliveries, (self.clock() + seconds, next(self._numbers), action))

    def next_delivery(self) -> float | None:
        """Return the time of the next delivery, if any."""
        return self._deliveries[0][0] if self._deliveries else None

    def deliver_one(self) -> None:
        """Run the next delivery."""
        heapq.heappop(self._deliveries)[2]()

    def open_connections(self, loop: SimulatedLoop | None = None) -> "Iterator[Connection]":
        """Yield the connections that are not broken; with `loop`, those that end at this process."""
        self._connections = [one for one in self._connections if not one.broken]
        return (one for one in self._connections if loop is None or loop in (one.client, one.server))

    def _delay(self) -> float:
        if self._random.random() < self._latency.late_share:
            return self._random.random() * self._latency.late
        return self._random.expovariate(1 / self._latency.usual)


class Connection:
    """A connection of a channel to a server, with its calls."""

    def __init__(self, network: Network, client: SimulatedLoop, service: Server) -> None:
        self.network = network
        self.client = client
        self.service = service
        self.server = service.loop
        self.broken = False
        self.is_cut = False  # broken, and the server knows
        self.silent_since: float | None = None  # what is sent is lost, and neither side receives an error
        self.messages_left: int | None = None  # of both directions, before it is silent
        self.calls: list[Call] = []
        self._ended_unheard: list[Call] = []  # by the client, while the connection was silent

    @property
    def carries(self) -> bool:
        """Whether a message sent or delivered now arrives."""
        return not self.broken and self.silent_since is None

    def arrives(self) -> bool:
        """Return whether a message that is due arrives."""
        if self.messages_left == 0:
            self.silence()
        elif self.messages_left is not None:
            self.messages_left -= 1
        return self.carries

    def silence(self) -> None:
        """Lose what is sent from now on, and what is under way."""
        if self.silent_since is None:
            self.silent_since = self.network.clock()

    def cut(self) -> None:
        """Break the connection: messages under way are lost, and each side receives the error at its own time."""
        if self.is_cut or (self.broken and self.silent_since is None):
            return
        self.broken = self.is_cut = True
        for call in self.calls:
            call.on_cut()
        for call in self._ended_unheard:
            call.on_client_lost()

    def loses_cancellation(self, call: "Call") -> bool:
        """Return whether the server does not learn now that the client has ended a call; it does at the cut."""
        if self.silent_since is None or self.is_cut:
            return False
        self._ended_unheard.append(call)
        return True

    def close(self) -> None:
        """Close the connection at the client, cancelling its calls."""
        for call in list(self.calls):
            call.cancel()
        self.broken = True


class Pipe:
    """The messages of one direction of a call, in order; None ends them."""

    def __init__(self, connection: Connection, path: str, *, responses: bool) -> None:
        self._connection = connection
        self._path = path
        self._responses = responses
        self._sender, self._receiver = connection.client, connection.server
        if responses:
            self._sender, self._receiver = self._receiver, self._sender
        self._arrived: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._last = 0.0

    def send(self, message: bytes | None) -> None:
        """Send a message. It is lost if the connection breaks before it arrives."""
        self.send_action(message, lambda: self.put(message))

    def send_action(self, contents: bytes | Status | None, action: Callable[[], None]) -> None:
        """Run the action that delivers `contents` behind the messages sent so far, unless the connection breaks."""
        connection = self._connection
        if connection.carries:
            kind = DeliveryKind.RESPONSES if self._responses else DeliveryKind.REQUESTS
            delivery = Delivery(connection, kind, contents)
            self._last = connection.network.deliver_after(
                self._last, delivery, lambda: action() if connection.arrives() else self._note(contents, lost=True)
            )
        else:
            self._note(contents, lost=True)

    def _note(self, message: bytes | Status | None, *, lost: bool = False) -> None:
        if (on_arrival := self._connection.network.on_arrival) is not None:
            on_arrival(Arrival(self._sender.name, self._receiver.name, self._path, self._responses, message, lost))

    def put(self, message: bytes | Status | None) -> None:
        """Let a message arrive now."""
        self._note(message)
        self._arrived.append(message)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def get(self) -> Any:
        """Wait for the next message."""
        while not self._arrived:
            self._reader = self._receiver.create_future()
            await self._reader
        return self._arrived.popleft()


class Call:
    """A call on a connection: requests, responses, and the status, which follows the responses."""

    def __init__(self, connection: Connection, path: str) -> None:
        self.connection = connection
        self.path = path
        self.begun = connection.network.clock()
        self.requests = Pipe(connection, path, responses=False)
        self.responses = Pipe(connection, path, responses=True)
        self._handling: asyncio.Task[None] | None = None
        self._ended = False  # at the client
        connection.calls.append(self)
        begin = Delivery(connection, DeliveryKind.REQUESTS, "the call")
        connection.network.deliver_after(0, begin, lambda: self._begin(path))

    @property
    def method(self) -> str:
        """Its gRPC method, without the service."""
        return self.path.rpartition("/")[2]

    def cancel(self, status: Status = _CANCELLED) -> None:
        """End the call at the client; the server's handler is cancelled when the message arrives."""
        if not self._ended and not self.connection.client.dead:
            self._end(status)
            if not (self.connection.broken or self.connection.loses_cancellation(self)):
                self._deliver(DeliveryKind.HANDLER_LOST, self._end_handler_unless_silent)

    def send_status(self, status: Status) -> None:
        """Send the status from the server, behind its responses."""
        if not self.connection.server.dead:
            self.responses.send_action(status, lambda: self._end(status))

    def on_cut(self) -> None:
        """Let both sides receive that the connection is broken."""
        self._deliver(DeliveryKind.LOST, lambda: self._end(Status(grpc.StatusCode.UNAVAILABLE, _BROKEN)))
        self.on_client_lost()

    def on_client_lost(self) -> None:
        """Let the server receive that the connection is broken."""
        self._deliver(DeliveryKind.HANDLER_LOST, self._end_handler)

    def _begin(self, path: str) -> None:
        connection = self.connection
        if connection.carries and not connection.server.dead:
            self._handling = connection.service.handle(self, path)

    def _end(self, status: Status) -> None:
        """Let the status arrive at the client now, behind the responses that have arrived."""
        if not self._ended:
            self._ended = True
            self.responses.put(status)
            if self in self.connection.calls:
                self.connection.calls.remove(self)

    def _end_handler_unless_silent(self) -> None:
        if not self.connection.loses_cancellation(self):
            self._end_handler()

    def _end_handler(self) -> None:
        task = self._handling
        if task is None or task.done() or self.connection.server.dead:
            return
        self.requests.put(None)
        self._deliver(DeliveryKind.HANDLER_CANCELLED, lambda: _cancel(task), most=_CANCEL_SECONDS)

    def _deliver(self, kind: DeliveryKind, action: Callable[[], None], most: float | None = None) -> None:
        delivery = Delivery(self.connection, kind, kind.value)
        self.connection.network.deliver_after(0, delivery, action, most)


def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
