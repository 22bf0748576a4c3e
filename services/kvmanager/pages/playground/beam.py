"""The example of a beam search that the PagedAttention paper draws in its Figure 9, a step at a time."""

from collections.abc import Callable

from blocks import FreeReason
from services.kvmanager.pages.playground.sandbox_pool import SandboxPool


class BeamExample:
    """Four beams. `stage` counts the steps that were played; after the last one it begins anew."""

    def __init__(self) -> None:
        self.stage = 0
        self._beams: list[int] = []

    def next(self, pool: SandboxPool) -> None:
        """Play the next step. Whatever the pool refuses is raised as it is, and ends the example."""
        play = _STAGES[self.stage]
        try:
            self._beams = play(pool, self._beams)
        except Exception:
            self.stage, self._beams = 0, []
            raise
        self.stage = (self.stage + 1) % BEAM_STAGES


def _prompt(pool: SandboxPool, _: list[int]) -> list[int]:
    pool.say("Beam search with four beams, as in Figure 9 of the paper. The prompt fills one block.")
    return [pool.begin_sequence(pool.new_tokens(pool.block_size), 5 * pool.block_size)]


def _part(pool: SandboxPool, beams: list[int]) -> list[int]:
    pool.say("Two candidates part: they share the prompt, and each gets a block of its own.")
    beams = [beams[0], pool.fork(beams[0])]
    pool.grow(beams, pool.block_size)
    return beams


def _go_on(pool: SandboxPool, beams: list[int]) -> list[int]:
    pool.say("Both go on for another block.")
    pool.grow(beams, pool.block_size)
    return beams


def _diverge(pool: SandboxPool, beams: list[int]) -> list[int]:
    first, other = beams
    pool.say(f"Three candidates come from sequence {first}: they share its three blocks and diverge in the fourth.")
    beams = [first, pool.fork(first), pool.fork(first), other]
    pool.grow(beams, pool.block_size)
    return beams


def _choose(pool: SandboxPool, beams: list[int]) -> list[int]:
    first, second, third, last = beams
    pool.say(f"The four best of the next step all come from {second} and {third}: {first} and {last} are pruned.")
    beams = [second, pool.fork(second), third, pool.fork(third)]
    pool.free([first, last], FreeReason.PRUNED)
    pool.grow(beams, 1)
    return beams


def _copy(pool: SandboxPool, beams: list[int]) -> list[int]:
    first, second, third, last = beams
    pool.say(f"Next, {first} goes on twice and {last} not at all. Its last block is begun: only that one is copied.")
    beams = [first, second, third, pool.fork(first)]
    pool.free([last], FreeReason.PRUNED)
    pool.grow(beams, 1)
    return beams


def _end(pool: SandboxPool, beams: list[int]) -> list[int]:
    pool.say("The search is over. Whole blocks stay cached until their space is needed.")
    pool.free(beams, FreeReason.FINISHED)
    return []


_STAGES: tuple[Callable[[SandboxPool, list[int]], list[int]], ...] = (
    _prompt,
    _part,
    _go_on,
    _diverge,
    _choose,
    _copy,
    _end,
)
BEAM_STAGES = len(_STAGES)
