"""Outputs of requests: starts, scores, tokens and ends."""

from typing import NamedTuple

from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.step_plan import Sampled


class Started(NamedTuple):
    """A request has its first blocks."""

    request_id: str
    cached_tokens: int
    isolated: bool = False  # from the next turn on it is alone in its batch


class Scored(NamedTuple):
    """Prompt tokens with their log-probabilities, starting at `position`."""

    request_id: str
    position: int
    tokens: list[Sampled]


class Tokens(NamedTuple):
    """New tokens of one sample of a request."""

    request_id: str
    tokens: list[Sampled]
    sample: int = 0
    end: Sequence | None = None  # the sample, if these are its last tokens

    @property
    def token_ids(self) -> list[int]:
        """Ids of the tokens."""
        return [token.token_id for token in self.tokens]


class Finished(NamedTuple):
    """A request ended; the group has the reasons."""

    request_id: str
    group: Group


Output = Started | Scored | Tokens | Finished


class Outputs:
    """Outputs that were not taken yet."""

    def __init__(self) -> None:
        self._pending: list[Output] = []

    def emit(self, output: Output) -> None:
        """Append an output."""
        self._pending.append(output)

    def take(self) -> list[Output]:
        """Return the outputs since the last call."""
        outputs, self._pending = self._pending, []
        return outputs
