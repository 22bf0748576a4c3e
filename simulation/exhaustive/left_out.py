"""What the structure of a process leaves out: statistics, histories, and what is the same in each process of a kind."""

import asyncio
import logging

from engine.schedule.stats import SchedulerTotals
from kvmanager.history.ledger import Ledger
from kvmanager.manager import PoolTotals
from kvmanager.tier.key_index import KeyIndex
from quire.v1.kvmanager_pb2_grpc import KVManagerStub
from services.engine.observer import EngineObserver, EngineStats
from services.engine.recording import RequestsRecorder
from services.kvmanager.observer import PoolObserver
from services.kvmanager.recorder import OperationsRecorder
from services.runtime.tracing.spans import Tracing
from simulation.invariants.watched_manager import WatchedManager
from simulation.network.connections import Call, Network
from simulation.processes.attached import EngineSize
from simulation.runner import DigestRunner
from simulation.universe import Universe

# Objects of these classes. A state has the time and the messages of the universe and its network.
LEFT_OUT: frozenset[type] = frozenset(
    (
        EngineObserver,
        EngineSize,
        EngineStats,
        KVManagerStub,
        Ledger,
        Network,
        OperationsRecorder,
        PoolObserver,
        PoolTotals,
        RequestsRecorder,
        SchedulerTotals,
        Tracing,
        Universe,
        logging.Logger,
    )
)

# Attributes: a count that only `Queue.join` reads, the dicts of an index by the bytes of keys, the computed steps, and
# times for checks of leases and silences that are not made here.
LEFT_OUT_ATTRIBUTES: dict[type, frozenset[str]] = {
    asyncio.Queue: frozenset({"_unfinished_tasks"}),
    KeyIndex: frozenset({"_shards"}),
    DigestRunner: frozenset({"plans"}),
    Call: frozenset({"begun"}),
    WatchedManager: frozenset({"_unregistered_at"}),
}
