"""Bookkeeping of KV cache blocks: allocation, reference counts, copy-on-write, prefix cache.

Pure and synchronous: values in, values out; no clock, no network, no tensors.
"""

from kvmanager.adoption import adopt
from kvmanager.applied import AppliedStep
from kvmanager.errors import (
    IdInUse,
    InvalidItem,
    InvalidRegistration,
    InvalidReport,
    ItemRefused,
    KVManagerError,
    OutOfBlocks,
    PinTooLarge,
    SessionReplaced,
    StaleIncarnation,
    StepOutOfOrder,
    TooManyBlocks,
    UnknownKind,
    UnknownPin,
    UnknownPool,
    UnknownRequest,
    UnknownSequence,
)
from kvmanager.history.events import Event, PoolChange
from kvmanager.history.explanation import Explanation
from kvmanager.history.ledger import Ledger
from kvmanager.lookup import PrefixHolding
from kvmanager.manager import KVManager, PoolTotals, Registration, Session
from kvmanager.observe.audit import Audit, Violation
from kvmanager.observe.block_lifetimes import BlockLifetimes, LifetimeSamples
from kvmanager.observe.block_map import (
    BlockMap,
    BlockState,
    Cell,
    MapChanges,
    PoolMap,
    TableEntry,
    entries_of,
    state_of,
)
from kvmanager.observe.slots import Slots
from kvmanager.pool import Pool
from kvmanager.pool_spec import PoolSpec
from kvmanager.pool_state import PoolState, SequenceTable
from kvmanager.report import PoolReport, SequenceReport, TierReport, report_of, reporting
from kvmanager.tier.tier import BlockCounts, Eviction, Seal, Tier

__all__ = [
    "AppliedStep",
    "Audit",
    "BlockCounts",
    "BlockLifetimes",
    "BlockMap",
    "BlockState",
    "Cell",
    "Event",
    "Eviction",
    "Explanation",
    "IdInUse",
    "InvalidItem",
    "InvalidRegistration",
    "InvalidReport",
    "ItemRefused",
    "KVManager",
    "KVManagerError",
    "Ledger",
    "LifetimeSamples",
    "MapChanges",
    "OutOfBlocks",
    "PinTooLarge",
    "Pool",
    "PoolChange",
    "PoolMap",
    "PoolReport",
    "PoolSpec",
    "PoolState",
    "PoolTotals",
    "PrefixHolding",
    "Registration",
    "Seal",
    "SequenceReport",
    "SequenceTable",
    "Session",
    "SessionReplaced",
    "Slots",
    "StaleIncarnation",
    "StepOutOfOrder",
    "TableEntry",
    "Tier",
    "TierReport",
    "TooManyBlocks",
    "UnknownKind",
    "UnknownPin",
    "UnknownPool",
    "UnknownRequest",
    "UnknownSequence",
    "Violation",
    "adopt",
    "entries_of",
    "report_of",
    "reporting",
    "state_of",
]
