"""The engine's proof of blocks, and what must be true of what it compares."""

from collections.abc import Sequence
from random import Random

import torch

from engine.kept.seal_writer import SealWriter
from engine.proof.block_proof import BlockProof
from engine.schedule.pool.condemnations import AdmittedBlocks, WrongBlock
from engine.schedule.step_plan import Copies
from simulation.digest_memory import DigestMemory
from simulation.invariants.violation import Violation

Place = tuple[int, bool, int]
"""A block: the number of its kind, whether it is of the host tier, and its own number."""


class WatchedProof(BlockProof):
    """Raises Violation where the proof is wrong.

    * A block that is found wrong was flipped, or is a copy of such a block.
    * A block that is hit is found wrong if it was flipped. One that is swapped in may have flipped slots behind its
      sequence's tokens, which were there when its checksum was computed; steps must not read them.

    `condemned` are all blocks that were withheld at the start or found wrong, `found` those of the engine's turn.
    """

    def __init__(
        self,
        memory: DigestMemory,
        seals: SealWriter,
        shares: tuple[float, float],
        condemned: set[Place],
    ) -> None:
        """Take the shares of compared blocks, and of recomputed hits."""
        share, recomputed_share = shares
        random = Random(len(memory.device)).random
        super().__init__(memory.kinds, seals, share, random, recomputed_share, self._same)
        self._kinds = memory.kinds
        self.condemned = condemned
        self.found: list[WrongBlock] = []

    def _same(self, kind: int, one: int, other: int) -> bool:
        device = self._kinds[kind].device
        return torch.equal(device[one], device[other])

    def check(self, answers: Sequence[Copies], arrivals: Sequence[AdmittedBlocks]) -> list[WrongBlock]:
        """See BlockProof."""
        found = super().check(answers, arrivals)
        self._add(found)
        for arrival in arrivals:
            for kind, table in enumerate(() if arrival.swapped_in else arrival.tables):
                for block in table:
                    if self._is_flipped((kind, False, block)) and (kind, False, block) not in self.condemned:
                        raise Violation(f"sequence {arrival.sequence} reads block {block}, which was flipped")
        return found

    def differences(self, hit: AdmittedBlocks, tables: Sequence[tuple[int, ...]]) -> list[WrongBlock]:
        """See BlockProof."""
        found = super().differences(hit, tables)
        self._add(found)
        return found

    def _add(self, found: Sequence[WrongBlock]) -> None:
        for one in found:
            place = one.kind, one.host, one.block
            if not self._is_flipped(place):
                raise Violation(f"{_words(place)} is condemned for {one.reason.name.lower()}, but was not flipped")
            self.condemned.add(place)
        self.found += found

    def _is_flipped(self, place: Place) -> bool:
        kind, host, block = place
        return bool(self._kinds[kind].flipped.of(host, block))

    def faults_of(self, tables: Sequence[Sequence[int]]) -> list[str]:
        """Return a message for each condemned block in tables of a computed step, by kind."""
        return [
            f"{_words(place)} is used, although it was condemned"
            for kind, table in enumerate(tables)
            for block in table
            if (place := (kind, False, block)) in self.condemned
        ]


def _words(place: Place) -> str:
    kind, host, block = place
    return f"{'host ' if host else ''}block {block} of kind {kind}"
