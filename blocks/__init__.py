"""Exactly what engine and KV manager say to each other, as frozen plain values. Imports the standard library alone."""

from blocks.manager import BlockManager, Reattached
from blocks.result import Copy, Refusal, StepRefusal, StepResult, TableChange
from blocks.step import (
    Allocate,
    Commit,
    Extend,
    Fork,
    Free,
    FreeReason,
    Length,
    Pin,
    PinChange,
    Reset,
    Step,
    StepItem,
    Unpin,
)

__all__ = [
    "Allocate",
    "BlockManager",
    "Commit",
    "Copy",
    "Extend",
    "Fork",
    "Free",
    "FreeReason",
    "Length",
    "Pin",
    "PinChange",
    "Reattached",
    "Refusal",
    "Reset",
    "Step",
    "StepItem",
    "StepRefusal",
    "StepResult",
    "TableChange",
    "Unpin",
]
