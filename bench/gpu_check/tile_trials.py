"""Times candidates for tiles and splits of the attention kernels, and for swaps, and checks their results."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch

from bench.gpu_check.cases import DTYPE, GROUP, KV_HEADS, batch_of, blocks_of
from bench.gpu_check.references import worst_row
from bench.gpu_check.timing import Run, recorded, seconds_of
from engine.attention.backend import PagedBatch, Scoring
from engine.attention.cache import CacheGeometry
from engine.gpu.triton_backend import TritonBackend
from engine.triton_kernels.block_copy import swap_blocks
from engine.triton_kernels.decode import decode
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


class Swap(NamedTuple):
    """How blocks are copied between the tiers: the programs of a launch."""

    programs: int


class SwapSizes(NamedTuple):
    """Blocks copied in each direction, and matrix products beside them: `[rows, width] @ [width, width]`."""

    blocks: int
    rows: int
    width: int
    products: int


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
        self.head_size = head_size
        self.repetitions = repetitions
        blocks = max(map(blocks_of, [*batches, (prompt,)]))
        geometry = CacheGeometry.uniform(_LAYERS, KV_HEADS, head_size)
        self._backend = TritonBackend(geometry, BLOCK_SIZE, blocks, DTYPE, device)
        self._backend.cache.normal_()
        self._device = device
        self._factors = ScoreFactors.of(Scoring(head_size**-0.5))
        self._tuning = tuning_for(head_size, DTYPE, GROUP, device)
        self._decoding = {tuple(one): self._case(batch_of(one, self.cache), head_size) for one in batches}
        self._prompt = self._case(batch_of((prompt,), self.cache, fed=(prompt,)), head_size)

    @property
    def cache(self) -> torch.Tensor:
        """The cache on the device."""
        return self._backend.cache

    @property
    def tuning(self) -> Tuning:
        """The committed tuning."""
        return self._tuning

    def decode_seconds(self, tiling: Tiling, split: Split, batches: Sequence[Sequence[int]]) -> float:
        """Return the seconds of these decoding batches, in all layers. Raises AssertionError for a wrong result."""
        processors = 2 if self._device.type == "cpu" else _processors(self._device)
        tuning = split.applied(replace(self._tuning, decode=tiling), processors)
        return sum(self._seconds(case, tuning) for case in map(self._decoding.__getitem__, map(tuple, batches)))

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
        work = WorkList.allocate(len(case.batch.fed), tiles, heads, self._backend.paged_layer(0), tuning)

        def run() -> None:
            list_work(work, case.batch, KV_HEADS, GROUP, None, tuning)
            for number in range(_LAYERS):
                layer = self._backend.paged_layer(number)
                attend = decode if decodes else prefill
                attend(case.query, output, layer, case.batch, work, self._factors, tuning)

        repeat = recorded(run, self._device)
        repeat()
        error = worst_row(output, case.expected.float())
        assert error <= _MOST_ERROR, f"results differ by {error:.2g}"
        return median(seconds_of(repeat, self._device) for _ in range(self.repetitions))


class SwapTrials:
    """Blocks that go to the host and back beside matrix products, which need the processors that copy.

    The blocks from the host are zeros, so that attention in this cache cannot be checked afterwards.
    """

    def __init__(self, trials: TileTrials, sizes: SwapSizes) -> None:
        """Allocate a host tier and the factors of the products."""
        self._trials, self._sizes = trials, sizes
        self._device = trials.cache.device
        self._out, self._back = self._pairs(0), self._pairs(sizes.blocks)
        pinned = self._device.type == "cuda"
        self._host = torch.zeros(2 * sizes.blocks, *trials.cache.shape[1:], dtype=DTYPE, pin_memory=pinned)
        self._left = torch.randn(sizes.rows, sizes.width, dtype=DTYPE, device=self._device)
        self._right = torch.randn(sizes.width, sizes.width, dtype=DTYPE, device=self._device)
        self._lanes = _Lane(self._device), _Lane(self._device)

    def seconds(self, swap: Swap) -> float:
        """Return the seconds of the products and the copies together. Raises AssertionError for a wrong copy."""
        tuning = replace(self._trials.tuning, swap_programs=swap.programs)
        cache = self._trials.cache

        def run() -> None:
            out, back = self._lanes
            out.run(lambda: swap_blocks(cache, self._host, self._out, tuning))
            back.run(lambda: swap_blocks(self._host, cache, self._back, tuning))
            for _ in range(self._sizes.products):
                torch.mm(self._left, self._right)
            out.join()
            back.join()

        found = [seconds_of(run, self._device) for _ in range(1 + self._trials.repetitions)]
        count = self._sizes.blocks
        assert torch.equal(cache[:count].cpu(), self._host[:count]), "the copies on the host differ"
        return median(found[1:])

    def _pairs(self, begin: int) -> torch.Tensor:
        blocks = torch.arange(begin, begin + self._sizes.blocks, device=self._device)
        return torch.stack([blocks, blocks], 1)


class _Lane:
    """A stream beside the current one. On a CPU there is only one."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # pragma: no cover - CUDA

    def run(self, work: Run) -> None:
        if self._stream is None:
            work()
            return
        self._stream.wait_stream(torch.cuda.current_stream())  # pragma: no cover - CUDA
        with torch.cuda.stream(self._stream):  # pragma: no cover - CUDA
            work()  # pragma: no cover - CUDA

    def join(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)  # pragma: no cover - CUDA


def _processors(device: torch.device) -> int:  # pragma: no cover - CUDA
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
