"""The plan of a step: one plain value, which a runner executes and which could be sent as it is to every worker."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from blocks import Copy
from engine.schedule.request import NO_RULES, LogitRules, Sampling

# In the place of a token that the step before samples, when that was launched and has not brought it yet.
PENDING = -1


class RowRules(NamedTuple):
    """All that changes the logits of one row: the rules asked for, the tokens that they look at, and what is banned.

    `prompt` and `output` are empty where no rule looks at them. `mask` has the bits of the tokens that can be chosen,
    as engine.constraint says; empty: all.
    """

    rules: LogitRules = NO_RULES
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    banned_token_ids: frozenset[int] = frozenset()
    mask: bytes = b""


class PromptPart(NamedTuple):
    """Tokens of a prompt to score, the first of them at `position`: each by the logits of the token before it."""

    position: int
    token_ids: tuple[int, ...]
    logprobs: int


class Sampled(NamedTuple):
    """A token that was drawn, or one of a prompt that was scored, or a beam's likeliest continuation.

    Where asked for, it comes with its log-probability and with pairs of the most likely tokens and theirs, most likely
    first: the log-softmax of the model's own logits, before any rule, temperature or filter. A beam's comes with all
    its candidates, and theirs are changed by the rules. A `fault` is why there is no token: what its request alone
    asks for raised.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    fault: Exception | None = None


class Work(NamedTuple):
    """What a step does for one sequence: feed `token_ids` at positions from `start` on, and sample if that is the end.

    Where the one token is PENDING, it is what the same sequence's work in the step launched before samples.

    `block_table` covers position `start + len(token_ids) - 1`. `sample_index` and the position name the random numbers.
    `rules` change the logits that all its samples are drawn from. `to_score` are prompt tokens whose log-probabilities
    are asked for; `logprobs` are asked for of the samples. A beam's sample is no draw: so many `candidates` are asked
    for, and 0 where it is none.
    """

    sequence: int
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    samples: bool
    sampling: Sampling
    sample_indices: tuple[int, ...] = (0,)
    rules: RowRules | None = None
    logprobs: int | None = None
    to_score: PromptPart | None = None
    candidates: int = 0

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed once the step is done."""
        return self.start + len(self.token_ids)

    @property
    def outcomes(self) -> int:
        """How many Sampled it brings."""
        scored = len(self.to_score.token_ids) if self.to_score else 0
        return scored + (len(self.sample_indices) if self.samples else 0)


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


class Launched(Protocol):
    """A step that was begun."""

    def result(self) -> list[Sampled]:
        """Wait for its end, and return what each work of the plan brings, in order.

        That is one Sampled for each token to score, then one for each sample. When it raises, the step counts as not
        done: nothing of it is committed.
        """

    def sample_seconds(self) -> float:
        """Return how much of it was sampling, by the device's clock; it is known once `result` has returned."""


@dataclass(frozen=True)
class Done:
    """A step that had ended before its launch returned."""

    results: list[Sampled]

    def result(self) -> list[Sampled]:
        """Return what it brought."""
        return self.results

    def sample_seconds(self) -> float:
        """Return 0: nothing was sampled, or it was not measured."""
        return 0.0


class Runner(Protocol):
    """Executes plans, one after the other in the order of the launches."""

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step, behind all that was launched before.

        Copies between the tiers may still be under way when it has ended. Raises CopyFailed when one of these or of
        earlier plans failed, and DeviceLost. When it raises anything else, the step counts as not done: nothing of it
        is committed.
        """
