"""Bookkeeping of KV-cache blocks: allocation, reference counts, copy-on-write, prefix cache.

Pure and synchronous: values in, values out, no clock, no network, no tensor.
"""

from kvmanager.errors import (
    IdInUse,
    InvalidItem,
    InvalidRegistration,
    ItemRefused,
    KVManagerError,
    OutOfBlocks,
    SessionReplaced,
    StaleIncarnation,
    StepOutOfOrder,
    UnknownPool,
    UnknownSequence,
)
from kvmanager.keys import KEY_BYTES, block_key, root_key
from kvmanager.manager import KVManager, PoolTotals, Session
from kvmanager.pool import Pool, PoolSpec, Sequence
from kvmanager.step import (
    Allocate,
    Commit,
    Copy,
    Extend,
    Fork,
    Free,
    FreeReason,
    Length,
    Refusal,
    Seal,
    Step,
    StepItem,
    StepRefusal,
    StepResult,
    TableChange,
)
from kvmanager.tier import BlockCounts, Tier

__all__ = [
    "KEY_BYTES",
    "Allocate",
    "BlockCounts",
    "Commit",
    "Copy",
    "Extend",
    "Fork",
    "Free",
    "FreeReason",
    "IdInUse",
    "InvalidItem",
    "InvalidRegistration",
    "ItemRefused",
    "KVManager",
    "KVManagerError",
    "Length",
    "OutOfBlocks",
    "Pool",
    "PoolSpec",
    "PoolTotals",
    "Refusal",
    "Seal",
    "Sequence",
    "Session",
    "SessionReplaced",
    "StaleIncarnation",
    "Step",
    "StepItem",
    "StepOutOfOrder",
    "StepRefusal",
    "StepResult",
    "TableChange",
    "Tier",
    "UnknownPool",
    "UnknownSequence",
    "block_key",
    "root_key",
]
