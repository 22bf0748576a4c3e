"""Thresholds of the alerts, with presets for engines on a CPU and on a GPU."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from services.gateway.observe.distributions import DISTRIBUTIONS

Preset = Literal["cpu", "gpu"]
PRESETS: tuple[Preset, ...] = ("cpu", "gpu")

_FIRST_TOKEN, _TOKEN = (DISTRIBUTIONS[name][2] for name in ("first_token", "inter_token"))


class UnknownThreshold(Exception):
    """There is no such threshold, or the value is out of its bounds."""


@dataclass(frozen=True)
class Threshold:
    """A number in the rules. `choices` are the bounds of a histogram's buckets; a share is at most 1."""

    name: str
    cpu: float
    gpu: float
    meaning: str
    choices: tuple[float, ...] = ()

    @property
    def maximum(self) -> float | None:
        """The largest value, None if there is no limit."""
        return 1 if self.name.endswith(("Share", "Budget")) else None

    def checked(self, value: float) -> float:
        """Return the value. Raises UnknownThreshold if it is out of bounds."""
        if self.choices and value not in self.choices:
            raise UnknownThreshold(f"{self.name} is {value:g}, but it must be one of {listed(self.choices)}")
        if value <= 0 or (self.maximum is not None and value > self.maximum):
            most = "" if self.maximum is None else f" and at most {self.maximum:g}"
            raise UnknownThreshold(f"{self.name} is {value:g}, but it must be more than 0{most}")
        return value


THRESHOLDS = (
    Threshold("errorBudget", 0.001, 0.001, "share of requests that may end with an error"),
    Threshold("latencyBudget", 0.01, 0.01, "share of first tokens, and of other tokens, that may be late"),
    Threshold("firstTokenSeconds", 2.5, 1.0, "time after which a first token is late", _FIRST_TOKEN),
    Threshold("tokenSeconds", 0.2, 0.1, "time between two tokens after which the second is late", _TOKEN),
    Threshold("minErrors", 3, 3, "failed requests in the long window that a burn rate of errors must exceed"),
    Threshold("minRequests", 20, 20, "requests in the long window that a burn rate must exceed"),
    Threshold("minFailures", 5, 5, "requests of its kind in a quarter of an hour that a share must exceed"),
    Threshold("minTokens", 200, 200, "tokens in the long window that a burn rate of tokens must exceed"),
    Threshold("kvStepSeconds", 0.02, 0.01, "99th percentile of the KV manager's block steps"),
    Threshold("cancelSeconds", 1, 0.5, "99th percentile of the time from a disconnection to free blocks"),
    Threshold("heldShare", 0.9, 0.9, "share of a pool that is held while requests wait"),
    Threshold("recomputedShare", 0.1, 0.1, "share of computed tokens that preemptions recompute"),
    Threshold("leftOutShare", 0.05, 0.05, "share of sequences that miss a step"),
    Threshold("rejectedShare", 0.1, 0.1, "share of requests that are rejected"),
    Threshold("deadlineShare", 0.05, 0.05, "share of requests whose deadline passes in the queue"),
    Threshold("httpErrorShare", 0.05, 0.05, "share of HTTP answers with a status from 500 to 503"),
    Threshold("failoverShare", 0.1, 0.1, "share of requests that leave their engine"),
    Threshold("slowClientShare", 0.05, 0.05, "share of streams that are ended because of slow clients"),
)


def preset(name: Preset) -> dict[str, float]:
    """Return the values of a preset."""
    return {one.name: one.cpu if name == "cpu" else one.gpu for one in THRESHOLDS}


def changed(values: dict[str, float], given: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the values with those of `given`. Raises UnknownThreshold."""
    known = {one.name: one for one in THRESHOLDS}
    new = dict(values)
    for name, value in given:
        if name not in known:
            raise UnknownThreshold(f"there is no threshold {name}; they are {', '.join(known)}")
        new[name] = known[name].checked(value)
    return new


def listed(numbers: Iterable[float]) -> str:
    """Return the numbers as a list in words."""
    return ", ".join(f"{number:g}" for number in numbers)
