"""Times candidates for tiles and splits of the attention kernels, and checks their results."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch

from bench.gpu_check.cases import DTYPE, GROUP, KV_HEADS, batch_of, blocks_of
from bench.gpu_check.references import worst_row
from bench.gpu_check.timing import recorded, seconds_of
from engine.attention.backend import PagedBatch, Scoring
from engine.attention.cache import CacheGeometry
from engine.gpu.triton_backend import TritonBackend
from engine.triton_kernels.decode import decode
from engine.triton_kernels.paged_layer import PagedLayer
from engine.triton_kernels.prefill import prefill
from engine.triton_kernels.scores import ScoreFactors
from engine.triton_kernels.tuning import Tiling, Tuning, tuning_for
from engine.triton_kernels.work_list import WorkList, list_work, tile_count

BLOCK_SIZE = 16
_LAYERS = 2
_MOST_ERROR = 0.02


class Split(NamedTuple):
    """How decoding is split: programs for each processor, waves of items, and the least keys of an item."""

    programs_per_processor: int
    waves: int
    min_chunk: int

    def applied(self, tuning: Tuning, processors: int) -> Tuning:
        """Return the tuning with this split."""
        programs = self.programs_per_processor * processors
        return replace(tuning, programs=programs, waves=self.waves, min_chunk=self.min_chunk)


class _Case(NamedTuple):
    query: torch.Tensor
    batch: PagedBatch
    expected: torch.Tensor


class TileTrials:
    """Batches of one head size, run with other tunings than the committed one."""

    def __init__(
        self, head_size: int, batches: Sequence[Sequence[int]], prompt: int, repetitions: int, device: torch.device
    ) -> None:
        """Allocate a cache for the largest batch, and compute what all candidates must return."""
        blocks = max(map(blocks_of, [*batches, (prompt,)]))
        geometry = CacheGeometry(_LAYERS, KV_HEADS, head_size)
        self._backend = TritonBackend(geometry, BLOCK_SIZE, blocks, DTYPE, device)
        self._backend.cache.normal_()
        self._device = device
        self._repetitions = repetitions
        self._factors = ScoreFactors.of(Scoring(head_size**-0.5))
        self._tuning = tuning_for(head_size, DTYPE, GROUP, device)
        self._decoding = [self._case(batch_of(lengths, device), head_size) for lengths in batches]
        self._prompt = self._case(batch_of((prompt,), device, fed=(prompt,)), head_size)

    def decode_seconds(self, tiling: Tiling, split: Split) -> float:
        """Return the seconds of all decoding batches, in all layers. Raises AssertionError for a wrong result."""
        processors = 2 if self._device.type == "cpu" else _processors(self._device)
        tuning = split.applied(replace(self._tuning, decode=tiling), processors)
        return sum(self._seconds(case, tuning) for case in self._decoding)

    def prefill_seconds(self, tiling: Tiling) -> float:
        """Return the seconds of the prompt. Raises AssertionError for a wrong result."""
        return self._seconds(self._prompt, replace(self._tuning, prefill=tiling))

    def _case(self, batch: PagedBatch, head_size: int) -> _Case:
        query = torch.randn(sum(batch.fed), KV_HEADS * GROUP, head_size, dtype=DTYPE, device=self._device)
        scoring = Scoring(head_size**-0.5)
        return _Case(query, batch, self._backend.attend(_LAYERS - 1, query, batch, scoring).clone())

    def _seconds(self, case: _Case, tuning: Tuning) -> float:
        output = torch.full_like(case.query, float("nan"))
        decodes = case.batch.fed[0] == 1
        tiles, heads = tile_count(case.batch, GROUP, tuning), case.query.shape[1]
        work = WorkList.allocate(len(case.batch.fed), tiles, heads, PagedLayer(self._backend.cache, 0), tuning)

        def run() -> None:
            list_work(work, case.batch, KV_HEADS, GROUP, None, tuning)
            for number in range(_LAYERS):
                layer = PagedLayer(self._backend.cache, number)
                attend = decode if decodes else prefill
                attend(case.query, output, layer, case.batch, work, self._factors, tuning)

        repeat = recorded(run, self._device)
        repeat()
        error = worst_row(output, case.expected.float())
        assert error <= _MOST_ERROR, f"results differ by {error:.2g}"
        return median(seconds_of(repeat, self._device) for _ in range(self._repetitions))


def _processors(device: torch.device) -> int:  # pragma: no cover - CUDA
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
