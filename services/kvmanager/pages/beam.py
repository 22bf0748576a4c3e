"""The example of a beam search that the PagedAttention paper draws in its Figure 9, a step at a time."""

from collections.abc import Callable
from typing import Protocol

from blocks import FreeReason


class Driven(Protocol):
    """What the example drives."""

    block_size: int

    def begin_sequence(self, token_ids: list[int], final: int | None = None) -> int:
        """Let a sequence begin; return its id."""

    def new_tokens(self, number: int) -> list[int]:
        """Return so many tokens that no sequence has had."""

    def fork(self, number: int) -> int:
        """Let another sequence begin with all that one has; return its id."""

    def grow(self, numbers: list[int], tokens: int) -> None:
        """Let sequences go on by so many tokens each."""

    def free(self, numbers: list[int], reason: FreeReason) -> None:
        """Let sequences give their blocks back."""

    def say(self, text: str) -> None:
        """Write a line into the log."""


class BeamExample:
    """Four beams. `stage` counts the steps that were played; after the last one it begins anew."""

    def __init__(self) -> None:
        self.stage = 0
        self._beams: list[int] = []

    def next(self, pool: Driven) -> None:
        """Play the next step. Whatever the pool refuses is raised as it is, and ends the example."""
        play = _STAGES[self.stage]
        try:
            self._beams = play(pool, self._beams)
        except Exception:
            self.stage, self._beams = 0, []
            raise
        self.stage = (self.stage + 1) % BEAM_STAGES


def _prompt(pool: Driven, _: list[int]) -> list[int]:
    pool.say("Beam search with four beams, as in Figure 9 of the paper. The prompt fills one block.")
    return [pool.begin_sequence(pool.new_tokens(pool.block_size), 5 * pool.block_size)]


def _part(pool: Driven, beams: list[int]) -> list[int]:
    pool.say("Two candidates part: they share the prompt, and each gets a block of its own.")
    beams = [beams[0], pool.fork(beams[0])]
    pool.grow(beams, pool.block_size)
    return beams


def _go_on(pool: Driven, beams: list[int]) -> list[int]:
    pool.say("Both go on for another block.")
    pool.grow(beams, pool.block_size)
    return beams


def _diverge(pool: Driven, beams: list[int]) -> list[int]:
    first, other = beams
    pool.say(f"Three candidates come from sequence {first}: they share its three blocks and diverge in the fourth.")
    beams = [first, pool.fork(first), pool.fork(first), other]
    pool.grow(beams, pool.block_size)
    return beams


def _choose(pool: Driven, beams: list[int]) -> list[int]:
    first, second, third, last = beams
    pool.say(f"The four best of the next step all come from {second} and {third}: {first} and {last} are pruned.")
    beams = [second, pool.fork(second), third, pool.fork(third)]
    pool.free([first, last], FreeReason.PRUNED)
    pool.grow(beams, 1)
    return beams


def _copy(pool: Driven, beams: list[int]) -> list[int]:
    first, second, third, last = beams
    pool.say(f"Next, {first} goes on twice and {last} not at all. Its last block is begun: only that one is copied.")
    beams = [first, second, third, pool.fork(first)]
    pool.free([last], FreeReason.PRUNED)
    pool.grow(beams, 1)
    return beams


def _end(pool: Driven, beams: list[int]) -> list[int]:
    pool.say("The search is over. Whole blocks stay cached until their space is needed.")
    pool.free(beams, FreeReason.FINISHED)
    return []


_STAGES: tuple[Callable[[Driven, list[int]], list[int]], ...] = (
    _prompt,
    _part,
    _go_on,
    _diverge,
    _choose,
    _copy,
    _end,
)
BEAM_STAGES = len(_STAGES)
