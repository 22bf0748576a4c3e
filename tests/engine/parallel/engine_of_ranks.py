"""An engine whose steps several ranks compute, and a comparison of their caches with one rank's."""

from pathlib import Path
from typing import Any

import torch

from engine.kinds.kinds_backend import CachingBackend
from engine.parallel.leader import LeadingRunner
from engine.run.runner import ModelRunner
from engine.schedule.step_plan import Runner
from tests.engine.mixed_batch import MixedEngine
from tests.engine.parallel.other_ranks import OtherRanks

TOLERANCE = 1e-4  # relative to the largest number: sums over ranks have another order


class ParallelEngine(MixedEngine):
    """Rank 0 of several ranks."""

    def __init__(self, folder: Path, others: OtherRanks, **sizes: Any) -> None:
        self._others = others
        super().__init__(folder, **sizes)

    def make_backend(self, *_: object) -> CachingBackend:
        return self._others.mine.backend

    def make_runner(self, block_size: int, ahead: bool) -> Runner:
        mine = self._others.mine
        share = mine.ranks.broadcast if ahead else (lambda tokens: tokens)
        runner = ModelRunner(mine.loaded, mine.backend, block_size, decoder=mine.decoder, share=share)
        return LeadingRunner(runner, self._others.send, ahead=ahead)


def compare_contents(others: OtherRanks, whole: torch.Tensor) -> None:
    """Compare all blocks: of K and V of each layer, heads are the last but one dimension."""
    size = others.mine.ranks.size
    slots, own, elements = others.mine.backend.layout.parts[0][0].shape
    blocks = whole.view(len(whole), -1, slots, own * size, elements)
    for rank, heads in enumerate(blocks.chunk(size, dim=-2)):
        worst = (others.contents(rank).view_as(heads) - heads).abs().max()
        assert worst <= TOLERANCE * whole.abs().max(), f"rank {rank}"
