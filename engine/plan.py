"""The plan of a step: one plain value, which a runner executes and which could be sent as it is to every worker."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.blocks import Copy
from engine.request import RowRules, Sampling


class Work(NamedTuple):
    """What a step does for one sequence: feed `token_ids` at positions from `start` on, and sample if that is the end.

    `block_table` covers position `start + len(token_ids) - 1`. `sample_index` and the position name the random numbers.
    `rules` change the logits that all its samples are drawn from.
    """

    sequence: int
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    samples: bool
    sampling: Sampling
    sample_indices: tuple[int, ...] = (0,)
    rules: RowRules | None = None

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed once the step is done."""
        return self.start + len(self.token_ids)


class Copies(NamedTuple):
    """The copies of one answer. The lists are run in this order, the pairs of each in any."""

    device_to_host: tuple[Copy, ...] = ()
    host_to_device: tuple[Copy, ...] = ()
    device_to_device: tuple[Copy, ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """One step: copies first, answer by answer; then the work, decoding sequences (one token each) before prompts."""

    step: int
    copies: tuple[Copies, ...]
    work: tuple[Work, ...]


class Runner(Protocol):
    """Executes plans."""

    def execute(self, plan: StepPlan) -> list[int]:
        """Return a token id for each work of the plan that samples, in order, once all work was written.

        Copies between the tiers may still be under way then. Raises CopyFailed when one of these or of earlier plans
        failed. When it raises anything else, the step counts as not done: nothing of it is committed.
        """
