"""What must be true of time: requests leave engines, are not placed in haste, and silent connections are given up."""

from collections.abc import Iterator

from simulation.network.connections import Latency
from simulation.processes.attached import AttachedProcess
from simulation.processes.engine import EngineProcess
from simulation.processes.gateway import LINK_SECONDS, GatewayProcess
from simulation.universe import Universe

# How often bounds are checked, and how much later than promised something may happen, beside late messages.
_EVERY_SECONDS = 0.1
_LATE_SECONDS = 0.5
# An engine gives up a handshake after this time without a message.
_REGISTER_SECONDS = 10.0
# A gateway gives up its calls to an engine after this time without a message.
_CALL_SECONDS = {"GetEngine": 5.0, "GetTokenizer": 60.0, "Serve": LINK_SECONDS}
# A gateway waits between its attempts at engines that have refused a request, unless engines come and go.
_PLACED_PER_SECOND = 100
# A cancellation is behind a submission and the end of an attempt, each of which may be late.
_LATE_MESSAGES = 3


class Bounds:
    """Checks bounds where nothing can run before time passes."""

    def __init__(self, universe: Universe, latency: Latency) -> None:
        self._universe = universe
        self._late = _LATE_SECONDS + (_LATE_MESSAGES * latency.late if latency.late_share else 0.0)
        self._left: dict[str, tuple[GatewayProcess, float]] = {}
        self._next_at = 0.0

    def leaves(self, request_id: str, gateway: GatewayProcess) -> None:
        """Record that a client has left, or that its request has ended: engines must forget it."""
        self._left[request_id] = gateway, self._universe.now

    def faults(self) -> list[str]:
        """Return which bounds are exceeded."""
        if self._universe.now < self._next_at:
            return []
        self._next_at = self._universe.now + _EVERY_SECONDS
        return [*self._requests_left(), *self._placed_in_haste(), *self._silences()]

    def _requests_left(self) -> Iterator[str]:
        universe = self._universe
        for engine in universe.processes:
            if not isinstance(engine, EngineProcess) or engine.stopped:
                continue
            for name in engine.request_ids & self._left.keys():
                gateway, since = self._left[name]
                troubles = universe.disturbances
                since = max(since, troubles.of(engine), troubles.of(gateway), troubles.between(gateway, engine))
                if universe.now - since > self._late + engine.size.step_seconds:
                    yield f"{engine.name} still computes {name}, which has left {gateway.name}"

    def _placed_in_haste(self) -> Iterator[str]:
        for gateway in self._universe.processes:
            if isinstance(gateway, GatewayProcess):
                for name, _ in [one for one, count in gateway.placed.items() if count > _PLACED_PER_SECOND]:
                    yield f"{gateway.name} places {name} more than {_PLACED_PER_SECOND} times in a second"
                for past in [one for one in gateway.placed if one[1] < int(self._universe.now)]:
                    del gateway.placed[past]

    def _silences(self) -> Iterator[str]:
        universe = self._universe
        clients = {process.loop: process for process in universe.processes if not process.stopped}
        for connection in universe.network.open_connections():
            client = clients.get(connection.client)
            if connection.silent_since is None or client is None:
                continue
            seconds = universe.now - max(connection.silent_since, universe.disturbances.of(client))
            if isinstance(client, GatewayProcess) and any(
                min(seconds, universe.now - call.begun) > _CALL_SECONDS[call.method] + _LATE_SECONDS
                for call in connection.calls
            ):
                yield f"{client.name} keeps a link that carries nothing"
            elif (
                isinstance(client, AttachedProcess)
                and not client.link.attached.is_set()
                and seconds > _REGISTER_SECONDS + _LATE_SECONDS
            ):
                yield f"{client.name} waits for ever to be attached"
