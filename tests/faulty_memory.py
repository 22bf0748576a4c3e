"""Flips bits in the kept memory of an engine, running or dead, as faults of a machine's memory would."""

from mmap import mmap
from pathlib import Path

import torch

from engine.kept.header import HEADER_BYTES, read_header
from engine.kept.kept_memory import KeptMemory
from engine.kept.seals import SealState


class FaultyMemory:
    """The file of an engine that keeps its blocks, mapped without its lock."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            mapped = mmap(file.fileno(), 0)
        identity = read_header(mapped[:HEADER_BYTES])
        assert identity, "it has this format"
        self._kind = KeptMemory.mapped(memoryview(mapped), identity).kinds[0]

    def flip_blocks(self) -> list[int]:
        """Flip a bit of each sealed device block of kind 0, and return the blocks."""
        sealed = self._sealed()
        self._kind.cache.view(torch.uint8)[sealed, 0] ^= 1
        return sealed

    def flip_seals(self) -> list[int]:
        """Flip a bit of the checksum of each seal, which a running engine does not read; return the blocks."""
        sealed = self._sealed()
        self._kind.device._seals["own"][sealed] ^= 1
        return sealed

    def _sealed(self) -> list[int]:
        seals = self._kind.device
        return [block for block in range(1, len(seals) + 1) if seals.state(block) is SealState.SEALED]
