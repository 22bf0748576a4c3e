"""Whether proposals pay, by the measured durations of steps.

A step of n sequences that verifies m proposed tokens computes n + m rows. For batches of about the same size, greedy
or not, two averages are kept: rows and seconds of the steps without proposals, and of those with them. The line through
both gives the seconds of a row. Proposed tokens are ordered by the probability that they are accepted, and taken while
that raises the expected tokens per second: while the next one adds a clearly larger part to the tokens than to the
seconds, because the sequences of a batch whose tokens are accepted end sooner and leave smaller, costlier batches.
Where the memory's bandwidth bounds a step, rows cost little and many are taken; where arithmetic bounds it, none are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

_SMOOTHING = 0.1
# A longer step counts as this many times the expected one: something else ran.
_OUTLIER = 2.0
# Until both kinds of steps were measured, a row more is taken to cost this part of the average row. The guess weighs as
# much as one step with a quarter more rows, because the first steps with few more rows measure their cost badly.
_GUESSED_PART = 0.25
_GUESS_WEIGHT = 0.25
# A token's part of the tokens must be this many times its part of the seconds.
_MARGIN = 1.25
# Steps without proposals that are measured before the first one with them.
_FIRST_STEPS = 3
# So many steps with proposals until one without is measured anew, and the other way round.
_STEPS_UNTIL_RETRY = 64


@dataclass
class _Average:
    """Moving averages of the rows and the seconds of steps."""

    rows: float
    seconds: float
    steps: int = 1

    def add(self, rows: int, seconds: float) -> None:
        self.steps += 1
        weight = max(_SMOOTHING, 1 / self.steps)
        self.rows += weight * (rows - self.rows)
        self.seconds += weight * (seconds - self.seconds)


@dataclass
class _BatchCosts:
    """The steps of batches of about the same size."""

    without: _Average
    proposing: _Average | None = None
    since_without: int = 0
    declined: int = 0

    @property
    def row_seconds(self) -> float:
        """Seconds of a row more."""
        without, proposing = self.without, self.proposing
        rows, seconds, weight = 0.0, 0.0, _GUESS_WEIGHT * without.rows
        if proposing is not None:
            rows, seconds = proposing.rows - without.rows, proposing.seconds - without.seconds
            weight /= min(proposing.steps, 1 / _SMOOTHING)
        guess = _GUESSED_PART * without.seconds / without.rows
        return max(0.0, (seconds + weight * guess) / (rows + weight))

    @property
    def is_measured(self) -> bool:
        """Whether steps without proposals are measured, and recently."""
        return self.without.steps >= _FIRST_STEPS and self.since_without < _STEPS_UNTIL_RETRY

    def seconds(self, rows: float) -> float:
        """Return the expected seconds of a step."""
        return self.without.seconds + self.row_seconds * (rows - self.without.rows)


@dataclass
class SpeculationCosts:
    """The measured costs of decoding steps, by size of the batch; deterministic given the durations."""

    _batches: dict[tuple[int, bool], _BatchCosts] = field(default_factory=dict)

    def may_pay(self, sequences: int, chance: float, *, random: bool = False) -> bool:
        """Return whether `choose` may take tokens that have at most this chance: else none are worth a search.

        Counts a step for which it returns False as one that declined.
        """
        costs = self._batches.get((sequences.bit_length(), random))
        if costs is None or not costs.is_measured:
            return False
        if _pays(chance, sequences, costs.seconds(sequences), costs.row_seconds):
            return True
        costs.declined += 1
        return costs.declined >= _STEPS_UNTIL_RETRY

    def choose(self, sequences: int, chances: Sequence[float], *, random: bool = False) -> int:
        """Return how many proposed tokens a step of so many sequences verifies, the most likely first.

        `chances`: the probabilities that they are accepted, in descending order. `random`: some sequences are not
        greedy; noise and filters of a row can cost more than the model.
        """
        costs = self._batches.get((sequences.bit_length(), random))
        if costs is None or not costs.is_measured:
            return 0
        taken, tokens, seconds, row = 0, float(sequences), costs.seconds(sequences), costs.row_seconds
        for chance in chances:
            if not _pays(chance, tokens, seconds, row):
                break
            taken, tokens, seconds = taken + 1, tokens + chance, seconds + row
        costs.declined = 0 if taken else costs.declined + 1
        if costs.declined < _STEPS_UNTIL_RETRY:
            return taken
        costs.declined = 0
        return min(len(chances), max(1, round(_GUESS_WEIGHT * sequences)))

    def observe(self, sequences: int, proposed: int, seconds: float, *, random: bool = False) -> None:
        """Count the duration of a decoding step that verified `proposed` tokens."""
        rows, batch = sequences + proposed, (sequences.bit_length(), random)
        costs = self._batches.get(batch)
        if costs is None:
            if not proposed:
                self._batches[batch] = _BatchCosts(_Average(rows, seconds))
            return
        seconds = min(seconds, _OUTLIER * costs.seconds(rows))
        if not proposed:
            costs.without.add(rows, seconds)
            costs.since_without = 0
            return
        costs.since_without += 1
        if costs.proposing is None:
            costs.proposing = _Average(rows, seconds)
        else:
            costs.proposing.add(rows, seconds)


def _pays(chance: float, tokens: float, seconds: float, row_seconds: float) -> bool:
    """Return whether one more token is a clearly larger part of a step's expected tokens than of its seconds."""
    return chance * seconds >= _MARGIN * tokens * row_seconds
