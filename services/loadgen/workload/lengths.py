"""Distributions of lengths in tokens, and their notation on the command line."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class InvalidLengths(Exception):
    """A text that is not a distribution; the message lists the valid forms."""


class Lengths(Protocol):
    """A distribution of lengths of at least 1."""

    def draw(self, random: np.random.Generator) -> int:
        """Return the next length."""
        ...


@dataclass(frozen=True)
class Fixed:
    """A constant length."""

    tokens: int

    def draw(self, random: np.random.Generator) -> int:  # noqa: ARG002
        """Return the length."""
        return self.tokens

    def __str__(self) -> str:
        return str(self.tokens)


@dataclass(frozen=True)
class Uniform:
    """Uniformly distributed lengths from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, random: np.random.Generator) -> int:
        """Return a random length."""
        return int(random.integers(self.low, self.high, endpoint=True))

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"


@dataclass(frozen=True)
class LogNormal:
    """Log-normally distributed lengths with this `mean`; `sigma` is the standard deviation of their logarithms."""

    mean: float
    sigma: float

    def draw(self, random: np.random.Generator) -> int:
        """Return a random length, rounded, at least 1."""
        return max(1, round(float(random.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma))))

    def __str__(self) -> str:
        return f"lognormal:{self.mean:g}:{self.sigma:g}"


def parse(text: str) -> Lengths:
    """Read `128`, `64-256` or `lognormal:MEAN:SIGMA`. Raises InvalidLengths."""
    try:
        made = _parsed(text)
    except ValueError:
        made = None
    if made is None:
        raise InvalidLengths(
            f"lengths must be such as 128, 64-256 or lognormal:MEAN:SIGMA, and at least 1, not {text!r}"
        )
    return made


def _parsed(text: str) -> Lengths | None:
    if text.startswith("lognormal:"):
        mean, sigma = map(float, text.removeprefix("lognormal:").split(":"))
        return LogNormal(mean, sigma) if 1 <= mean < math.inf and 0 <= sigma < math.inf else None
    low, dash, high = text.partition("-")
    if dash:
        return Uniform(int(low), int(high)) if 1 <= int(low) <= int(high) else None
    return Fixed(int(text)) if int(text) >= 1 else None
