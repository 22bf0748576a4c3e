"""Beam search: which continuations are kept, and which finished ones become answers.

Rules, scores and termination are those of transformers' beam search, so that results are equal. A step compares the
most likely continuations of all beams. The best unfinished ones stay beams. Finished ones become answers if they rank
among the first `width`.
"""

from collections.abc import Sequence
from heapq import nlargest
from typing import NamedTuple

from engine.schedule.request import BeamSearch, FinishReason, Stopping, candidates_per_beam

# Of one beam: tokens and their log-probabilities, most likely first.
Candidates = Sequence[tuple[int, float]]


class Continuation(NamedTuple):
    """A beam of the next step: index of its parent beam, its new token, and its cumulative log-probability."""

    parent: int
    token_id: int
    logprob: float


class BeamAnswer(NamedTuple):
    """A finished text. `score` is its log-probability divided by length (in tokens) to the power of length_penalty."""

    token_ids: tuple[int, ...]
    score: float
    finish: FinishReason
    stop_token: int | None


class Beams:
    """The state of one search. Sequences hold the tokens of the beams."""

    def __init__(self, search: BeamSearch, stopping: Stopping) -> None:
        """Start with the prompt as the only beam."""
        self.width = search.width
        self.logprobs = [0.0]  # of the live beams, most likely first
        self.answers: list[BeamAnswer] = []  # best first, `width` at most
        self.done = False
        self._search = search
        self._stopping = stopping

    @property
    def candidates(self) -> int:
        """Number of continuations compared for each beam."""
        return candidates_per_beam(self._search, self._stopping)

    def advance(self, texts: Sequence[Sequence[int]], found: Sequence[Candidates]) -> list[Continuation]:
        """Process the candidates of each beam and return the beams of the next step, none if the search is done.

        `texts` are the generated tokens of each beam.
        """
        length = len(texts[0]) + 1
        best = nlargest(
            self.candidates,
            (
                Continuation(beam, token, self.logprobs[beam] + logprob)
                for beam, candidates in enumerate(found)
                for token, logprob in candidates
            ),
            key=lambda one: (one.logprob, -one.parent, -one.token_id),
        )
        ends = [one for one in best[: self.width] if self._finish(one, length)]
        survivors = [one for one in best if not self._finish(one, length)][: self.width]
        self.answers = nlargest(
            self.width,
            [*self.answers, *(self._answer(one, texts[one.parent], length) for one in ends)],
            key=lambda answer: answer.score,
        )
        self.logprobs = [one.logprob for one in survivors]
        self.done = not survivors or self._cannot_improve(length)
        return [] if self.done else survivors

    def abandon(self) -> None:
        """Discard all answers."""
        self.done, self.answers = False, []

    def _finish(self, one: Continuation, length: int) -> FinishReason | None:
        if one.token_id in self._stopping.token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self._stopping.max_tokens else None

    def _answer(self, one: Continuation, text: Sequence[int], length: int) -> BeamAnswer:
        finish = self._finish(one, length)
        assert finish is not None, "an answer has ended"
        stop_token = one.token_id if finish is FinishReason.STOP else None
        return BeamAnswer((*text, one.token_id), self._score(one.logprob, length), finish, stop_token)

    def _cannot_improve(self, length: int) -> bool:
        """Return whether `width` answers exist and no beam is expected to beat the worst, at the current length."""
        if len(self.answers) < self.width:
            return False
        return self._search.early_stopping or self._score(self.logprobs[0], length) <= self.answers[-1].score

    def _score(self, logprob: float, length: int) -> float:
        # Penalties from -10 to 10 keep the power within double precision. Logarithms would merge nearly equal scores.
        return float(logprob / length**self._search.length_penalty)
