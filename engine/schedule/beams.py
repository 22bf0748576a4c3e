"""Beam search: which continuations of a prompt are kept, and which of those that ended are the answers.

The rules, the scores and the ends are those of transformers' beam search, so that the answers are its answers. One step
looks at the likeliest continuations of all beams together: the best that do not end go on, those that end become
answers if they are among the first `width`.
"""

from collections.abc import Sequence
from heapq import nlargest
from typing import NamedTuple

from engine.schedule.request import BeamSearch, FinishReason, Stopping, candidates_per_beam

# What the runner brings for one beam: tokens and what they add to its log-probability, likeliest first.
Candidates = Sequence[tuple[int, float]]


class Continuation(NamedTuple):
    """A beam of the next step: the one that it goes on from, its new token, and its log-probability with it."""

    parent: int
    token_id: int
    logprob: float


class BeamAnswer(NamedTuple):
    """A text that ended. `score` is its log-probability over its length, in tokens, to the power of length_penalty."""

    token_ids: tuple[int, ...]
    score: float
    finish: FinishReason
    stop_token: int | None


class Beams:
    """The state of one search. It does not know where the beams keep their tokens."""

    def __init__(self, search: BeamSearch, stopping: Stopping) -> None:
        """Begin with the prompt as the only beam."""
        self.width = search.width
        self.logprobs = [0.0]  # of the beams that go on, likeliest first
        self.answers: list[BeamAnswer] = []  # best first, `width` at most
        self.done = False
        self._search = search
        self._stopping = stopping

    @property
    def candidates(self) -> int:
        """How many continuations of each beam are looked at."""
        return candidates_per_beam(self._search, self._stopping)

    def advance(self, texts: Sequence[Sequence[int]], found: Sequence[Candidates]) -> list[Continuation]:
        """Take in what was found for each beam, `texts` being what they generated; return the beams that go on.

        None goes on when the search is over.
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
        going_on = [one for one in best if not self._finish(one, length)][: self.width]
        self.answers = nlargest(
            self.width,
            [*self.answers, *(self._answer(one, texts[one.parent], length) for one in ends)],
            key=lambda answer: answer.score,
        )
        self.logprobs = [one.logprob for one in going_on]
        self.done = not going_on or self._cannot_improve(length)
        return [] if self.done else going_on

    def abandon(self) -> None:
        """Give up whatever was found."""
        self.done, self.answers = False, []

    def _finish(self, one: Continuation, length: int) -> FinishReason | None:
        if one.token_id in self._stopping.token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self._stopping.max_tokens else None

    def _answer(self, one: Continuation, text: Sequence[int], length: int) -> BeamAnswer:
        finish = self._finish(one, length)
        assert finish is not None, "only what ends is an answer"
        stop_token = one.token_id if finish is FinishReason.STOP else None
        return BeamAnswer((*text, one.token_id), self._score(one.logprob, length), finish, stop_token)

    def _cannot_improve(self, length: int) -> bool:
        """Return whether there are `width` answers that nothing is expected to beat, judging at the present length."""
        if len(self.answers) < self.width:
            return False
        return self._search.early_stopping or self._score(self.logprobs[0], length) <= self.answers[-1].score

    def _score(self, logprob: float, length: int) -> float:
        # With a penalty that is admitted no power leaves the doubles, so that the order is the quotients' own: taken by
        # way of logarithms, scores that are nearly equal would become equal.
        return float(logprob / length**self._search.length_penalty)
