"""Writes the blocks that a proof has found wrong into the log."""

import logging
from collections.abc import Sequence
from itertools import islice

from blocks import CondemnReason, counted
from engine.proof.block_proof import BlockProof
from engine.schedule.pool.condemnations import AdmittedBlocks, WrongBlock
from engine.schedule.step_plan import Copies

MOST_LINES = 100
"""Lines of one process: memory that fails has more wrong blocks than a log should have lines."""

_MOST_BLOCKS = 16  # of a line

log = logging.getLogger("quire.engine")


class LoggedProof:
    """A proof that logs what it finds, at most MOST_LINES lines. The engine's thread calls it."""

    def __init__(self, proof: BlockProof, kinds: Sequence[str]) -> None:
        """`kinds` are the names of the kinds of blocks."""
        self._proof = proof
        self._kinds = kinds
        self._left = MOST_LINES

    def check(self, answers: Sequence[Copies], arrivals: Sequence[AdmittedBlocks]) -> list[WrongBlock]:
        """See Proof."""
        return self._logged(self._proof.check(answers, arrivals))

    def chooses_recomputation(self) -> bool:
        """See Proof."""
        return self._proof.chooses_recomputation()

    def remember(self, hit: AdmittedBlocks) -> None:
        """See Proof."""
        self._proof.remember(hit)

    def differences(self, hit: AdmittedBlocks, tables: Sequence[tuple[int, ...]]) -> list[WrongBlock]:
        """See Proof."""
        return self._logged(self._proof.differences(hit, tables))

    def _logged(self, wrong: list[WrongBlock]) -> list[WrongBlock]:
        together: dict[tuple[CondemnReason, int, bool], list[int]] = {}
        for one in wrong:
            together.setdefault((one.reason, one.kind, one.host), []).append(one.block)
        for (reason, kind, host), blocks in islice(together.items(), self._left):
            self._left -= 1
            tier = "host" if host else "device"
            which = self._kinds[kind], tier, reason.name.lower(), _listed(blocks)
            sentence = "condemned %s of kind %s from the %s, whose contents are wrong (%s): %s"
            failure = self._proof.copy_failure if reason is CondemnReason.COPY else None
            log.error(sentence, counted(len(blocks), "block"), *which, exc_info=failure)
            if not self._left:
                log.error("further wrong blocks are counted, and not logged")
        return wrong


def _listed(blocks: Sequence[int]) -> str:
    listed = ", ".join(map(str, blocks[:_MOST_BLOCKS]))
    more = len(blocks) - _MOST_BLOCKS
    return f"{listed} and {more} more" if more > 0 else listed
