"""Memory use of contiguous reservation for the same sequences, as in Figure 2 of the PagedAttention paper.

Each sequence gets one slab when it begins, in the first hole that is large enough, and shares nothing. Sequences
without a slab wait in order for freed memory. Three policies choose the size of a slab: the maximum length (Orca's
Max), the next power of two above the final length (Pow2), and the final length (Oracle).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Demand(NamedTuple):
    """The present and the final length of a sequence, in tokens."""

    sequence: int
    tokens: int
    final: int


class ContiguousSlots(NamedTuple):
    """Breakdown of the slots of the memory, without `waiting`, which counts sequences without a slab.

    `used` slots hold tokens, `reserved` ones will, `internal` ones never will. `external` slots are free, but in holes
    too small for the next slab; `free` slots are the rest.
    """

    used: int
    reserved: int
    internal: int
    external: int
    free: int
    waiting: int


@dataclass
class _Slab:
    start: int
    size: int


def next_power_of_two(tokens: int) -> int:
    """Return the smallest power of two that is at least `tokens`."""
    return 1 << max(tokens - 1, 0).bit_length()


class ContiguousMemory:
    """Slabs of sequences in contiguous memory. `size_of` returns the size of a slab for a final length."""

    def __init__(self, slots: int, size_of: Callable[[int], int]) -> None:
        """Start with all slots free."""
        self._slots = slots
        self._size_of = size_of
        self._slabs: dict[int, _Slab] = {}
        self._last_size = size_of(1)  # size of the latest requested slab, assumed for the next one

    def follow(self, demands: Iterable[Demand]) -> ContiguousSlots:
        """Free the slabs of ended sequences, allocate those of new or outgrown ones, and return the breakdown."""
        wanted = {one.sequence: one for one in demands}
        for sequence in list(self._slabs):
            if sequence not in wanted or self._slabs[sequence].size < self._size_of(wanted[sequence].final):
                del self._slabs[sequence]
        for one in wanted.values():
            if one.sequence not in self._slabs:
                self._last_size = self._size_of(one.final)
                start = self._first_fit(self._last_size)
                if start is not None:
                    self._slabs[one.sequence] = _Slab(start, self._last_size)
        return self._counted(wanted)

    def slabs(self) -> list[tuple[int, int, int]]:
        """Return sequence, first slot and size of each slab, in order of their first slots."""
        return sorted(
            ((sequence, slab.start, slab.size) for sequence, slab in self._slabs.items()), key=lambda one: one[1]
        )

    def _counted(self, wanted: dict[int, Demand]) -> ContiguousSlots:
        placed = [(wanted[sequence], slab.size) for sequence, slab in self._slabs.items()]
        used = sum(one.tokens for one, _ in placed)
        reserved = sum(one.final - one.tokens for one, _ in placed)
        internal = sum(size - one.final for one, size in placed)
        waiting = [one for sequence, one in wanted.items() if sequence not in self._slabs]
        needed = self._size_of(waiting[0].final) if waiting else self._last_size
        holes = [size for _, size in self._holes()]
        external = sum(size for size in holes if size < needed)
        free = sum(holes) - external
        return ContiguousSlots(used, reserved, internal, external, free, len(waiting))

    def _first_fit(self, size: int) -> int | None:
        return next((start for start, hole in self._holes() if hole >= size), None)

    def _holes(self) -> list[tuple[int, int]]:
        holes, end = [], 0
        for slab in sorted(self._slabs.values(), key=lambda slab: slab.start):
            if slab.start > end:
                holes.append((end, slab.start - end))
            end = slab.start + slab.size
        if end < self._slots:
            holes.append((end, self._slots - end))
        return holes


def policies(longest: int) -> dict[str, Callable[[int], int]]:
    """Return the slab size functions by policy name. `longest` is the maximum length of a sequence."""
    return {
        "max": lambda _: longest,
        "pow2": lambda final: min(next_power_of_two(final), longest),
        "exact": lambda final: final,
    }
