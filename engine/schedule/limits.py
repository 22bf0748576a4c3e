"""Limits of a step and of the queue."""

from dataclasses import dataclass
from enum import Enum

# Proposed tokens of a sequence in one step. A guess is seldom right for longer, and each costs a row of logits.
MAX_PROPOSED_TOKENS = 32


class Preemption(Enum):
    """How preemption frees blocks. AUTO chooses the cheaper way for each group, by measured costs."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


@dataclass(frozen=True)
class Limits:
    """Limits of a step and of the queue. Raises ValueError, naming the field, if they are inconsistent.

    `token_budget` limits the tokens scheduled in one step, `max_sequences` the sequences that hold blocks,
    `max_waiting` the queue. `admission_watermark` is the fraction of the pool that an admission leaves free while other
    requests run.

    With `priority_aging` (seconds), a request of priority p is ordered as if it had arrived p times that much later; 0
    orders by priority first. An isolated request blocks the others for at most `isolation_seconds`.

    At most `proposed_tokens` are proposed for a sequence in one step; 0 turns speculation off.
    """

    token_budget: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    preemption: Preemption = Preemption.RECOMPUTE
    admission_watermark: float = 0.0
    priority_aging: float = 0.0
    isolation_seconds: float = 10.0
    proposed_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_sequences", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.proposed_tokens <= MAX_PROPOSED_TOKENS:
            raise ValueError(f"proposed_tokens must be between 0 and {MAX_PROPOSED_TOKENS}, not {self.proposed_tokens}")
        if self.token_budget < self.max_sequences:
            raise ValueError(
                f"token_budget must be at least max_sequences ({self.max_sequences}), not {self.token_budget}: "
                "each decoding sequence takes one token of each step"
            )

    def watermark(self, device_blocks: int) -> int:
        """Return the number of blocks that an admission leaves free while other requests run.

        Rounded down, because one block is a large part of a tiny pool.
        """
        return int(self.admission_watermark * device_blocks)
