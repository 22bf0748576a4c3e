"""How likely a proposed token is accepted."""

from typing import Self

# The first guess, by tokens of the match.
_FIRST_GUESS = {4: 0.6, 3: 0.4, 2: 0.2}
_SMOOTHING = 0.1
_NEUTRAL, _FORGETTING = 0.5, 1 / 256


class AcceptanceRates:
    """Moving averages of the part of proposed tokens that is accepted, by the length of the match.

    A token counts only if all before it were accepted.
    """

    def __init__(self) -> None:
        self._rates = dict(_FIRST_GUESS)

    def for_sequence(self) -> Self:
        """Return the rates that a new sequence starts with: the average of all, and at least half the first guess."""
        new = type(self)()
        new._rates = {match: max(rate, _FIRST_GUESS[match] / 2) for match, rate in self._rates.items()}
        return new

    def most(self) -> float:
        """Return the largest probability that the next token of a draft is accepted, now or after `forget`."""
        return max(_NEUTRAL, *self._rates.values())

    def chances(self, match: int, tokens: int) -> list[float]:
        """Return for each of the next `tokens` the probability that it and all before it are accepted."""
        rate = self._rates[match]
        return [rate**place for place in range(1, tokens + 1)]

    def count(self, match: int, accepted: int, proposed: int) -> None:
        """Count the tokens of one draft: `accepted` leading ones, and the refused one behind them, if any."""
        rate = self._rates[match]
        for _ in range(accepted):
            rate += _SMOOTHING * (1 - rate)
        if accepted < proposed:
            rate -= _SMOOTHING * rate
        self._rates[match] = rate

    def forget(self, match: int) -> None:
        """Move a little towards even odds, because a draft was not tried: so that it is tried again after a while."""
        self._rates[match] += _FORGETTING * (_NEUTRAL - self._rates[match])
