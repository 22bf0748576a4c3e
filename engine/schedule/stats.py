"""What is counted of requests, each by itself and all together."""

from dataclasses import dataclass, field

from engine.schedule.request import Failure


@dataclass
class SchedulerTotals:
    """What has happened since the engine started."""

    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0  # of requests when they were begun,
    cached_tokens: int = 0  # and those of them found in the cache
    planned: int = 0  # sequences that took part in a step, summed over steps,
    skipped: int = 0  # and those that did not because the block manager's answer was not there
    swapped_tokens: int = 0  # computed tokens that preemptions moved to the host
    failures: dict[Failure, int] = field(default_factory=lambda: dict.fromkeys(Failure, 0))  # of requests

    def count_step(self, step: int, sequences: int) -> None:
        """Count a step and the number of sequences in it."""
        self.steps = step
        self.planned += sequences

    def count_skipped(self, sequences: int) -> None:
        """Count sequences that take no part in a step."""
        self.skipped += sequences

    def count_started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count a request that was begun."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += min(cached_tokens, prompt_tokens)

    def count_computed(self, tokens: int, recomputed: int) -> None:
        """Count tokens that a step was fed, and those of them that had been computed before."""
        self.computed_tokens += tokens
        self.recomputed_tokens += recomputed

    def count_generated(self, tokens: int) -> None:
        """Count new tokens."""
        self.generated_tokens += tokens

    def count_preemption(self, swapped_tokens: int) -> None:
        """Count a preemption, and the computed tokens that it moves to the host."""
        self.preemptions += 1
        self.swapped_tokens += swapped_tokens

    def count_failure(self, failure: Failure) -> None:
        """Count a request that failed."""
        self.failures[failure] += 1


@dataclass
class RequestStats:
    """When what happened to one request, in seconds of the engine's clock, and what is counted of it."""

    started: bool = False  # it has had blocks
    cached_tokens: int = 0
    preempted_at: list[float] = field(default_factory=list)
    resumed_at: list[float] = field(default_factory=list)
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    held_blocks: int = 0  # when it ended

    @property
    def preemptions(self) -> int:
        """Times it was preempted."""
        return len(self.preempted_at)

    def start(self, cached_tokens: int) -> None:
        """Note that it has its first blocks, and how many of its tokens were found in the cache."""
        self.started, self.cached_tokens = True, cached_tokens

    def schedule(self, now: float) -> None:
        """Note when it first takes part in a step."""
        self.scheduled_at = now

    def count_recomputed(self, tokens: int) -> None:
        """Count tokens that were computed once more."""
        self.recomputed_tokens += tokens

    def count_token(self, now: float) -> None:
        """Note when it gained a token."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now

    def preempt(self, now: float, swapped_tokens: int) -> None:
        """Note that it lost its blocks, and how many computed tokens were moved to the host with them."""
        self.preempted_at.append(now)
        self.swapped_tokens += swapped_tokens

    def resume(self, now: float) -> None:
        """Note that it has blocks; its first ones are no resumption."""
        if self.preempted_at:
            self.resumed_at.append(now)

    def end(self, held_blocks: int) -> None:
        """Note what it held when it ended."""
        self.held_blocks = held_blocks
