"""Limits of a step and of the queue."""

from dataclasses import dataclass
from enum import Enum

# Proposed tokens of a sequence in one step. A guess is seldom right for longer, and each costs a row of logits.
MAX_PROPOSED_TOKENS = 32


_LEAST = {
    "token_budget": 1,
    "max_sequences": 1,
    "max_waiting": 1,
    "admission_budget": 0,
    "long_prefill_token_threshold": 0,
    "max_num_partial_prefills": 1,
    "max_long_partial_prefills": 1,
}


class Preemption(Enum):
    """How preemption frees blocks. AUTO chooses the cheaper way for each group, by measured costs."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


@dataclass(frozen=True)
class Limits:
    """Limits of a step and of the queue. Raises ValueError, naming the field, if they are inconsistent.

    `token_budget` limits the tokens scheduled in one step, `max_sequences` the sequences that hold blocks,
    `max_waiting` the queue. One block step admits requests until they have `admission_budget` tokens that are not
    cached; 0: `token_budget`. `admission_watermark` is the fraction of the pool that an admission leaves free while
    other requests run. With `growth_reserve` it also leaves a block for each running sequence where a preemption would
    lose computed tokens; without, the watermark alone, as the PagedAttention paper's artifact does.

    A prompt with more than `long_prefill_token_threshold` uncomputed tokens is long: see `PrefillOrder`; 0: none is,
    which is the order of the PagedAttention paper. At most `max_num_partial_prefills` prompts share the budget of a
    step in equal parts, and `max_long_partial_prefills` long ones what the others leave.

    With `priority_aging` (seconds), a request of priority p is ordered as if it had arrived p times that much later; 0
    orders by priority first. An isolated request blocks the others for at most `isolation_seconds`.

    At most `proposed_tokens` are proposed for a sequence in one step, behind at least `matched_tokens` that occurred
    before; 0 turns speculation off.
    """

    token_budget: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    preemption: Preemption = Preemption.RECOMPUTE
    admission_watermark: float = 0.0
    priority_aging: float = 0.0
    isolation_seconds: float = 10.0
    proposed_tokens: int = 0
    admission_budget: int = 0
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    matched_tokens: int = 2
    growth_reserve: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 <= self.proposed_tokens <= MAX_PROPOSED_TOKENS:
            raise ValueError(f"proposed_tokens must be between 0 and {MAX_PROPOSED_TOKENS}, not {self.proposed_tokens}")
        if self.token_budget < self.max_sequences:
            raise ValueError(
                f"token_budget must be at least max_sequences ({self.max_sequences}), not {self.token_budget}: "
                "each decoding sequence takes one token of each step"
            )

    @property
    def admitted_tokens(self) -> int:
        """Uncached tokens of the requests that one block step admits, except for its last request."""
        return self.admission_budget or self.token_budget

    @property
    def prefill_room(self) -> int:
        """Tokens of a prompt that receive blocks ahead of their computation: as many as a step can compute."""
        return self.token_budget

    def watermark(self, device_blocks: int) -> int:
        """Return the number of blocks that an admission leaves free while other requests run.

        Rounded down, because one block is a large part of a tiny pool.
        """
        return int(self.admission_watermark * device_blocks)
