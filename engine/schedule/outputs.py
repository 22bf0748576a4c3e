"""What is delivered of requests: their starts, scores, tokens and ends."""

from typing import NamedTuple

from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.step_plan import Sampled


class Started(NamedTuple):
    """A request has its first blocks."""

    request_id: str
    cached_tokens: int
    isolated: bool = False  # it is computed with no other in its batch, from the next turn on


class Scored(NamedTuple):
    """Tokens of a request's prompt with their log-probabilities, the first of them at `position`."""

    request_id: str
    position: int
    tokens: list[Sampled]


class Tokens(NamedTuple):
    """New tokens of one sample of a request."""

    request_id: str
    tokens: list[Sampled]
    sample: int = 0
    end: Sequence | None = None  # the sample, if it ended with them

    @property
    def token_ids(self) -> list[int]:
        """Their ids."""
        return [token.token_id for token in self.tokens]


class Finished(NamedTuple):
    """A request ended; the group says how."""

    request_id: str
    group: Group


Output = Started | Scored | Tokens | Finished


class Outputs:
    """Outputs that nobody has taken yet."""

    def __init__(self) -> None:
        self._pending: list[Output] = []

    def emit(self, output: Output) -> None:
        """Add what is to be delivered next."""
        self._pending.append(output)

    def take(self) -> list[Output]:
        """Return what was added since the last call."""
        outputs, self._pending = self._pending, []
        return outputs
