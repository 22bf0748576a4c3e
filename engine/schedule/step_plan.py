"""The plan of a step: a plain value that a runner executes and that could be sent to other workers."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from blocks import Copy, StepResult
from engine.schedule.request import NO_RULES, LogitRules, Sampling

# Placeholder of a token that the step in flight samples.
PENDING = -1
PENDING_TOKEN = (PENDING,)


class RowRules(NamedTuple):
    """Everything that changes the logits of one row: rules, the tokens they depend on, and banned tokens.

    `prompt` and `output` are empty unless a rule needs them. `mask` has a bit for each allowed token, see
    engine.constraint; empty allows all.
    """

    rules: LogitRules = NO_RULES
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    banned_token_ids: frozenset[int] = frozenset()
    mask: bytes = b""


class PromptPart(NamedTuple):
    """Prompt tokens to score, starting at `position`. The logits of the preceding token score each."""

    position: int
    token_ids: tuple[int, ...]
    logprobs: int


class Sampled(NamedTuple):
    """A sampled token, a scored prompt token, or the candidates of a beam.

    If requested it has its log-probability and the most likely tokens with theirs, most likely first: the log-softmax
    of the model's logits before rules, temperature and filters. A beam has all its candidates, with log-probabilities
    after the rules. `fault` is the exception raised for this request instead of a token.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    fault: Exception | None = None


class Work(NamedTuple):
    """The work of a step for one sequence.

    Computes `token_ids` at positions from `start` on, and samples after the last one if `samples`.

    If the only token is PENDING, the step launched before samples it.

    `block_table` is the whole table of the sequence, the same object until it changes; it covers at least position
    `start + len(token_ids) - 1`. So do `window_tables`, those of window kinds, whose blocks out of the window are 0.
    `sample_indices` and the position seed the random numbers. `rules` change the logits of all samples. `to_score` are
    prompt tokens whose log-probabilities are requested; `logprobs` is the number requested for samples. A beam returns
    `candidates` continuations instead of a sample; 0 if the sequence is no beam.

    The last `proposed` tokens are guesses. The step also samples after each of them, with the `later_rules` (empty if
    no row has rules); a sample holds if all guesses before it equal the samples at their positions.
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
    proposed: int = 0
    later_rules: tuple[RowRules | None, ...] = ()
    window_tables: tuple[tuple[int, ...], ...] = ()

    @property
    def end(self) -> int:
        """Number of computed tokens of the sequence after the step, if all proposed ones are accepted."""
        return self.start + len(self.token_ids)

    @property
    def least_end(self) -> int:
        """Number of computed tokens of the sequence after the step, if no proposed one is accepted."""
        return self.start + len(self.token_ids) - self.proposed

    @property
    def outcomes(self) -> int:
        """Number of Sampled values that the work returns."""
        scored = len(self.to_score.token_ids) if self.to_score else 0
        return scored + (len(self.sample_indices) if self.samples else 0) + self.proposed


class Copies(NamedTuple):
    """The block copies of one StepResult. The lists run in this order; pairs within a list run in any order.

    `windows` are those of each window kind.
    """

    device_to_host: tuple[Copy, ...] = ()
    host_to_device: tuple[Copy, ...] = ()
    device_to_device: tuple[Copy, ...] = ()
    windows: "tuple[Copies, ...]" = ()

    @property
    def any(self) -> bool:
        """Whether there is a copy of any kind of blocks."""
        own = self.device_to_host or self.host_to_device or self.device_to_device
        return bool(own) or any(window.any for window in self.windows)


def copies_of(result: StepResult) -> Copies:
    """Return the copies of a result, those of window kinds too."""
    windows = tuple(map(copies_of, result.windows)) if result.windows else ()
    return Copies(result.device_to_host, result.host_to_device, result.copies, windows)


@dataclass(frozen=True)
class StepPlan:
    """One step: copies, result by result; then work, decoding sequences (one known token each) before prompts."""

    step: int
    copies: tuple[Copies, ...]
    work: tuple[Work, ...]


class Launched(Protocol):
    """A launched step."""

    def result(self) -> list[Sampled]:
        """Wait for the step and return the results of its work, in order.

        For each work: one Sampled per token to score, then one per sample, then one per proposed token. If it raises,
        the step failed and nothing of it is committed.
        """

    def sample_seconds(self) -> float:
        """Return the time spent sampling, by the device's clock; valid after `result` returned."""


@dataclass(frozen=True)
class Done:
    """A step that ended before its launch returned."""

    results: list[Sampled]

    def result(self) -> list[Sampled]:
        """Return the results."""
        return self.results

    def sample_seconds(self) -> float:
        """Return 0: sampling was not measured."""
        return 0.0


class Runner(Protocol):
    """Executes plans in launch order."""

    def launch(self, plan: StepPlan) -> Launched:
        """Launch a step behind all steps launched before.

        Copies between the tiers may still be in flight when the step ends. Raises CopyFailed if one of these copies or
        of earlier plans failed, and DeviceLost. If anything else is raised, the step failed and nothing of it is
        committed.
        """
