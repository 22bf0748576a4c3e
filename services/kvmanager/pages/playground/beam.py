"""The beam search of Figure 9 of the PagedAttention paper, one step at a time."""

from collections.abc import Callable

from blocks import FreeReason
from services.kvmanager.pages.playground.sandbox_pool import SandboxPool


class BeamExample:
    """An example with four beams. `stage` is the next step; after the last one, the example starts again."""

    def __init__(self) -> None:
        self.stage = 0
        self._beams: list[int] = []

    def next(self, pool: SandboxPool) -> None:
        """Run the next step. Errors of the pool are raised and end the example."""
        run = _STAGES[self.stage]
        try:
            self._beams = run(pool, self._beams)
        except Exception:
            self.stage, self._beams = 0, []
            raise
        self.stage = (self.stage + 1) % BEAM_STAGES


def _prompt(pool: SandboxPool, _: list[int]) -> list[int]:
    pool.say("Beam search with four beams, as in Figure 9 of the paper. The prompt fills one block.")
    return [pool.begin_sequence(pool.new_tokens(pool.block_size), 5 * pool.block_size)]


def _split(pool: SandboxPool, beams: list[int]) -> list[int]:
    pool.say("Two candidates diverge: they share the prompt, and each is granted a separate block.")
    beams = [beams[0], pool.fork(beams[0])]
    pool.grow(beams, pool.block_size)
    return beams


def _continue(pool: SandboxPool, beams: list[int]) -> list[int]:
    pool.say("Both continue for one more block.")
    pool.grow(beams, pool.block_size)
    return beams


def _diverge(pool: SandboxPool, beams: list[int]) -> list[int]:
    first, other = beams
    pool.say(f"Three candidates descend from sequence {first}: they share its three blocks and diverge in the fourth.")
    beams = [first, pool.fork(first), pool.fork(first), other]
    pool.grow(beams, pool.block_size)
    return beams


def _choose(pool: SandboxPool, beams: list[int]) -> list[int]:
    first, second, third, last = beams
    pool.say(f"The four best candidates now descend from {second} and {third}: {first} and {last} are pruned.")
    beams = [second, pool.fork(second), third, pool.fork(third)]
    pool.free([first, last], FreeReason.PRUNED)
    pool.grow(beams, 1)
    return beams


def _copy(pool: SandboxPool, beams: list[int]) -> list[int]:
    first, second, third, last = beams
    pool.say(
        f"{first} continues twice and {last} is pruned. Only the last block of {first}, which is not full, is copied."
    )
    beams = [first, second, third, pool.fork(first)]
    pool.free([last], FreeReason.PRUNED)
    pool.grow(beams, 1)
    return beams


def _end(pool: SandboxPool, beams: list[int]) -> list[int]:
    pool.say("The search is complete. Full blocks stay cached until they are evicted.")
    pool.free(beams, FreeReason.FINISHED)
    return []


_STAGES: tuple[Callable[[SandboxPool, list[int]], list[int]], ...] = (
    _prompt,
    _split,
    _continue,
    _diverge,
    _choose,
    _copy,
    _end,
)
BEAM_STAGES = len(_STAGES)
