"""Statistics of requests, per request and in total."""

from dataclasses import dataclass, field

from engine.schedule.request import Failure


@dataclass
class SchedulerTotals:
    """Counters since the start of the engine."""

    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0  # of started requests,
    cached_tokens: int = 0  # and those of them that hit the prefix cache
    planned: int = 0  # sequences scheduled, summed over steps,
    skipped: int = 0  # and those left out because the block manager's result was late
    ahead: int = 0  # sequences of steps planned ahead, summed over steps,
    sat_out: int = 0  # and those that such a step left out because they need the results of the step before
    limited_steps: int = 0  # steps in which long prompts received a small part, because short ones followed
    swapped_tokens: int = 0  # computed tokens that preemptions swapped out
    drafts: int = 0  # sequences of steps with proposed tokens, summed over steps,
    draft_tokens: int = 0  # the proposed tokens,
    accepted_tokens: int = 0  # those of them that were accepted,
    declined_tokens: int = 0  # and tokens found that were not proposed, because they would not pay
    unspeculated: dict[str, int] = field(default_factory=dict)  # requests without proposals, by reason
    failures: dict[Failure, int] = field(default_factory=lambda: dict.fromkeys(Failure, 0))  # of requests

    def snapshot(self) -> "SchedulerTotals":
        """Return these counters as they are now, for other threads; those by reason stay the same objects."""
        copied = object.__new__(SchedulerTotals)
        copied.__dict__.update(self.__dict__)
        return copied

    def count_step(self, step: int, sequences: int) -> None:
        """Count a step and the number of sequences in it."""
        self.steps = step
        self.planned += sequences

    def count_skipped(self, sequences: int) -> None:
        """Count sequences left out of a step because their blocks are in flight."""
        self.skipped += sequences

    def count_ahead(self, sequences: int, sat_out: int) -> None:
        """Count the sequences of a step planned ahead, and those that it leaves out."""
        self.ahead += sequences
        self.sat_out += sat_out

    def count_limited(self) -> None:
        """Count a step in which long prompts received a small part."""
        self.limited_steps += 1

    def count_started(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Count a started request."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += min(cached_tokens, prompt_tokens)

    def count_computed(self, tokens: int, recomputed: int) -> None:
        """Count tokens computed in a step, and those of them that had been computed before."""
        self.computed_tokens += tokens
        self.recomputed_tokens += recomputed

    def count_generated(self, tokens: int) -> None:
        """Count new tokens."""
        self.generated_tokens += tokens

    def count_draft(self, proposed: int, accepted: int) -> None:
        """Count a sequence's proposed tokens, and those of them that were accepted."""
        self.drafts += 1
        self.draft_tokens += proposed
        self.accepted_tokens += accepted

    def count_declined(self, tokens: int) -> None:
        """Count tokens that were not proposed, because they would not pay."""
        self.declined_tokens += tokens

    def count_unspeculated(self, reason: str) -> None:
        """Count a request that gets no proposals."""
        self.unspeculated[reason] = self.unspeculated.get(reason, 0) + 1

    def count_preemption(self, swapped_tokens: int) -> None:
        """Count a preemption, and the computed tokens that it swaps out."""
        self.preemptions += 1
        self.swapped_tokens += swapped_tokens

    def count_failure(self, failure: Failure) -> None:
        """Count a failed request."""
        self.failures[failure] += 1


@dataclass
class RequestStats:
    """Times (seconds of the engine's clock) and counters of one request."""

    started: bool = False  # it has received blocks
    cached_tokens: int = 0
    preempted_at: list[float] = field(default_factory=list)
    resumed_at: list[float] = field(default_factory=list)
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    deferred_behind: str = ""  # the latest request that computed their common prefix while it waited for blocks
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    held_blocks: int = 0  # when it ended

    @property
    def preemptions(self) -> int:
        """Number of preemptions."""
        return len(self.preempted_at)

    def waiting_since(self, arrival: float) -> float:
        """Return the time since which a request that arrived at `arrival` waits for blocks: its latest preemption."""
        return self.preempted_at[-1] if self.preempted_at else arrival

    def start(self, cached_tokens: int) -> None:
        """Record the first blocks, and the number of tokens that hit the prefix cache."""
        self.started, self.cached_tokens = True, cached_tokens

    def defer(self, request_id: str) -> None:
        """Record that it waits for another request to compute their common prefix."""
        self.deferred_behind = request_id

    def schedule(self, now: float) -> None:
        """Record the time of the first scheduled step."""
        self.scheduled_at = now

    def count_recomputed(self, tokens: int) -> None:
        """Count recomputed tokens."""
        self.recomputed_tokens += tokens

    def count_token(self, now: float) -> None:
        """Record the time of a new token."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now

    def preempt(self, now: float, swapped_tokens: int) -> None:
        """Record a preemption, and the computed tokens swapped out with it."""
        self.preempted_at.append(now)
        self.deferred_behind = ""
        self.swapped_tokens += swapped_tokens

    def resume(self, now: float) -> None:
        """Record that the request has blocks; the first time is no resumption."""
        if self.preempted_at:
            self.resumed_at.append(now)

    def end(self, held_blocks: int) -> None:
        """Record the blocks held at the end."""
        self.held_blocks = held_blocks
