"""The plan of a step: one plain value, which a runner executes and which could be sent as it is to every worker."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.blocks import Copy
from engine.request import Sampling


class Work(NamedTuple):
    """What a step does for one sequence: feed `token_ids` at positions from `start` on, and sample if that is the end.

    `block_table` covers position `start + len(token_ids) - 1`. `sample_index` and the position name the random numbers.
    """

    sequence: int
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    samples: bool
    sampling: Sampling
    sample_index: int = 0

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed once the step is done."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class StepPlan:
    """One step: copies first, then the work, decoding sequences (one token each) before prompts."""

    step: int
    copies: tuple[Copy, ...]
    work: tuple[Work, ...]


class Runner(Protocol):
    """Executes plans."""

    def execute(self, plan: StepPlan) -> list[int]:
        """Return a token id for each work of the plan that samples, in order, once everything was written.

        When it raises, the step counts as not done: nothing of it is committed.
        """
