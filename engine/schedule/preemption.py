"""How a preempted group comes back: computed again, or swapped to host memory and back (section 4.5 of the paper)."""

from enum import Enum

from engine.schedule.step_plan import StepPlan

# Steps that feed fewer tokens say what decoding costs, not what prefill does.
_FEWEST_TOKENS = 16
_WEIGHT_OF_NEWS = 0.2


class Preemption(Enum):
    """How blocks are taken from a group. AUTO takes the cheaper way for each, by what both were measured to cost."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


class PreemptionCosts:
    """What a token costs to compute again, and a block to move to the host and back, in seconds."""

    def __init__(self, seconds_per_block: float = 0.0) -> None:
        """Begin with the measured time of one block's way to the other tier; nothing is known of tokens yet."""
        self._seconds_per_block = seconds_per_block
        self._seconds_per_token: float | None = None

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Take in how long a step took."""
        tokens = sum(len(work.token_ids) for work in plan.work)
        if tokens < _FEWEST_TOKENS:
            return
        news = seconds / tokens
        before = news if self._seconds_per_token is None else self._seconds_per_token
        self._seconds_per_token = before + _WEIGHT_OF_NEWS * (news - before)

    def swap_is_cheaper(self, tokens: int, blocks: int) -> bool:
        """Return whether moving the blocks there and back takes less time than to compute the tokens again."""
        if self._seconds_per_token is None:
            return True
        return 2 * blocks * self._seconds_per_block < tokens * self._seconds_per_token
