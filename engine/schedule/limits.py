"""Bounds of a step and of the queue."""

from dataclasses import dataclass
from enum import Enum


class Preemption(Enum):
    """How blocks are taken from a group. AUTO takes the cheaper way for each, by what both were measured to cost."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


@dataclass(frozen=True)
class Limits:
    """Bounds of a step and of the queue.

    `token_budget` bounds the tokens fed in one step, `max_sequences` the sequences that hold blocks, `max_waiting` the
    queue. `preemption` is how blocks are taken from a group when others need them. `admission_watermark` is the
    fraction of the pool that an admission leaves free while something runs. With `priority_aging`, in seconds, a
    request of class p is served as if it had come p times as much later, whatever its class; 0: a class waits for those
    before it. An isolated request keeps the others waiting for `isolation_seconds` at most. Raises ValueError, naming
    the field, where they cannot work.
    """

    token_budget: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    preemption: Preemption = Preemption.RECOMPUTE
    admission_watermark: float = 0.0
    priority_aging: float = 0.0
    isolation_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_sequences", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.token_budget < self.max_sequences:
            raise ValueError(
                f"token_budget is {self.token_budget}, it must be at least max_sequences, {self.max_sequences}: "
                "each decoding sequence takes one token of every step"
            )

    def watermark(self, device_blocks: int) -> int:
        """Return how many blocks an admission leaves free while something runs.

        Rounded down: a block of a tiny pool is a large part of it, and a pool of some hundred has one to spare.
        """
        return int(self.admission_watermark * device_blocks)
