"""The contract between engine and KV manager as frozen plain values. Imports only the standard library."""

from blocks.arithmetic import blocks_for, counted
from blocks.keys import KEY_BYTES, block_key, block_keys, prefix_keys, root_key
from blocks.kinds import KIND_0, WindowKind
from blocks.manager import BlockManager, Reattached
from blocks.result import Copy, Refusal, StepRefusal, StepResult, TableChange
from blocks.step import (
    Allocate,
    Commit,
    Condemn,
    CondemnReason,
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
    Trim,
    Unpin,
)

__all__ = [
    "KEY_BYTES",
    "KIND_0",
    "Allocate",
    "BlockManager",
    "Commit",
    "Condemn",
    "CondemnReason",
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
    "Trim",
    "Unpin",
    "WindowKind",
    "block_key",
    "block_keys",
    "blocks_for",
    "counted",
    "prefix_keys",
    "root_key",
]
