"""The simulated KV manager."""

from collections.abc import Callable, Set
from dataclasses import dataclass

from quire.v1 import kvmanager_pb2_grpc
from services.kvmanager.observer import PoolObserver
from services.kvmanager.raw_request_interceptor import RawRequestInterceptor
from services.kvmanager.recorder import OperationsRecorder
from services.kvmanager.servicer import KVManagerServicer
from simulation.invariants.watched_manager import WatchedManager
from simulation.network.connections import Network
from simulation.network.server import SimulatedServer
from simulation.processes.process import Process

ADDRESS = "kvmanager:1"


@dataclass(frozen=True)
class ManagerLimits:
    """How long a lost engine's pool is kept, and the units of work after which a block step pauses."""

    lease_seconds: float = 10.0
    step_work: int = 1000


class ManagerProcess(Process):
    """A KV manager, which takes the manager's address."""

    def __init__(
        self, network: Network, clock: Callable[[], float], epoch: int, limits: ManagerLimits, ending: Set[int]
    ) -> None:
        super().__init__("kvmanager", clock)
        self.manager = WatchedManager(epoch, clock, limits.lease_seconds, self.loop.failures, ending)
        server = SimulatedServer(self.loop, (RawRequestInterceptor(),))
        self._recorder = OperationsRecorder("", 0)
        servicer = self.loop.run(
            lambda: KVManagerServicer(
                self.manager,
                PoolObserver(),
                clock,
                limits.lease_seconds,
                self._recorder,
                step_work=limits.step_work,
            )
        )
        kvmanager_pb2_grpc.add_KVManagerServicer_to_server(servicer, server)  # type: ignore[arg-type]
        network.listen(ADDRESS, server)
        self.start(servicer.run())
