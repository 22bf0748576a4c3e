"""Records of requests."""

from array import array
from dataclasses import dataclass, field
from typing import Any

COMPLETED = "completed"


@dataclass
class Usage:
    """The server's usage of a request; None for values that it does not report."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    preemptions: int | None = None
    recomputed_tokens: int | None = None
    failovers: int | None = None
    queued_seconds: float | None = None


@dataclass
class Record:
    """A request: its lengths, the times of its tokens, and its end. Times are seconds since the start of the run.

    `due` is the planned time of sending; `status` is COMPLETED or the name of its error. At `times[i]`, `counts[i]`
    tokens arrived together.
    """

    number: int
    session: int
    input_tokens: int
    asked_tokens: int
    due: float
    sent: float = 0.0
    ended: float = 0.0
    status: str = ""
    message: str = ""
    retry_after: float | None = None
    usage: Usage = field(default_factory=Usage)
    times: "array[float]" = field(default_factory=lambda: array("d"))
    counts: "array[int]" = field(default_factory=lambda: array("l"))

    def add_tokens(self, tokens: int, now: float) -> None:
        """Record received tokens."""
        self.times.append(now)
        self.counts.append(tokens)

    @property
    def completed(self) -> bool:
        """Whether the request completed."""
        return self.status == COMPLETED

    @property
    def output_tokens(self) -> int:
        """Number of received tokens."""
        return sum(self.counts)

    @property
    def first_token(self) -> float | None:
        """Time of the first token; None if there was none."""
        return self.times[0] if self.times else None

    def as_json(self) -> dict[str, Any]:
        """Return the record for a file: times in seconds, rounded to microseconds."""
        return {
            "number": self.number,
            "session": self.session,
            "status": self.status,
            "message": self.message,
            "retry_after_seconds": self.retry_after,
            "due": round(self.due, 6),
            "sent": round(self.sent, 6),
            "first_token": None if self.first_token is None else round(self.first_token, 6),
            "ended": round(self.ended, 6),
            "input_tokens": self.input_tokens,
            "asked_tokens": self.asked_tokens,
            "output_tokens": self.output_tokens,
            "usage": vars(self.usage),
            "token_times": [round(one, 6) for one in self.times],
            "token_counts": self.counts.tolist(),
        }
