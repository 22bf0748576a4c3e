"""What an explanation of a difference consists of."""

from collections.abc import Collection
from typing import NamedTuple

from bench.dialects.shapes import Comparison, Shape


class Explanation(NamedTuple):
    """A difference that is known.

    It covers these aspects of texts of a kind in these dialects, if they have the shape. `vllm` and `quire` say what
    each gives, and `why` why that is wanted. `worse`: it is not wanted, because vLLM's is better.
    """

    name: str
    kinds: tuple[str, ...]
    dialects: Collection[str]
    aspects: tuple[str, ...]
    shape: Shape
    vllm: str
    quire: str
    why: str
    worse: bool = False

    def covers(self, case: Comparison, found: Collection[str]) -> bool:
        """Return whether it explains its aspects of a difference."""
        sample = case.sample
        belongs = sample.kind in self.kinds and sample.profile.name in self.dialects
        if not belongs or not set(self.aspects) <= set(found):
            return False
        try:
            return self.shape(case)
        except (AttributeError, LookupError, TypeError, ValueError):  # other calls than it is about
            return False
