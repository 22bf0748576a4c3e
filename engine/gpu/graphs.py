"""Decoding steps recorded once for each batch size, and played again: hundreds of launches become one.

A recording freezes addresses and grids, so all that changes from step to step lies in buffers of their own, and
whatever depends on lengths is decided on the device. A batch takes the next larger size; the rows that are over feed a
token to block 0, which belongs to nobody.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.attention.backend import PagedBatch
from engine.decoder import Decoder

_WARMING_RUNS = 2  # compile kernels, and let libraries choose theirs, before anything is recorded

Run = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Records what a function launches."""

    def __call__(self, run: Run, /) -> tuple[Callable[[], None], torch.Tensor]:
        """Return what plays it again, and where its result then is."""


class CudaRecorder:
    """Records CUDA graphs that share their memory: no two of them may be played at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        """Run it a few times, then record it."""
        current = torch.cuda.current_stream(self._device)
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(_WARMING_RUNS):
                run()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        self._pool = self._pool or graph.pool()
        return graph.replay, output


def batch_sizes(most: int) -> list[int]:
    """Return the sizes to record for batches of up to `most` sequences: 1, 2, 4, 8, then every 16."""
    return [*(size for size in (1, 2, 4, 8) if size < most), *range(16, most, 16), most]


@dataclass(frozen=True)
class _Buffers:
    """What a step is told, for as many sequences as there can be; a recording of n reads the first n."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    tables: torch.Tensor
    first: torch.Tensor

    @classmethod
    def allocate(cls, sequences: int, blocks: int, device: torch.device) -> "_Buffers":
        # All rows begin as those that are over: a token at position 0 of block 0.
        return cls(
            token_ids=torch.zeros(sequences, dtype=torch.int64, device=device),
            positions=torch.zeros(sequences, dtype=torch.int64, device=device),
            slots=torch.zeros(sequences, dtype=torch.int64, device=device),
            ends=torch.ones(sequences, dtype=torch.int32, device=device),
            tables=torch.zeros(sequences, blocks, dtype=torch.int32, device=device),
            first=torch.arange(sequences + 1, dtype=torch.int32, device=device),
        )

    def take(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch, size: int) -> None:
        """Take a batch in, and make the rows up to `size` ones that are over."""
        count, width = batch.tables.shape
        given = (token_ids, positions, batch.slots, batch.ends)
        for buffer, values, over in zip(
            (self.token_ids, self.positions, self.slots, self.ends), given, (0, 0, 0, 1), strict=True
        ):
            buffer[:count].copy_(values)
            buffer[count:size].fill_(over)
        self.tables[:count, :width].copy_(batch.tables)
        self.tables[count:size, 0].fill_(0)

    def batch(self, size: int, block_size: int) -> PagedBatch:
        """Return the first `size` rows as a batch, anew each time: a backend may keep what it prepared for one."""
        return PagedBatch(
            block_size=block_size,
            fed=(1,) * size,
            slots=self.slots[:size],
            first=self.first[: size + 1],
            ends=self.ends[:size],
            tables=self.tables[:size],
        )


class RecordedDecoder:
    """Plays steps in which every sequence feeds one token, and leaves the others to the decoder that it recorded."""

    def __init__(
        self,
        decoder: Decoder,
        record: Recorder,
        block_size: int,
        blocks: int,
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        """Make the buffers for sequences of up to `blocks` blocks. Nothing is recorded yet; `sizes` are ascending."""
        self._decoder = decoder
        self._record = record
        self._block_size = block_size
        self._sizes = sizes
        self._buffers = _Buffers.allocate(sizes[-1], blocks, device)
        self._recorded: dict[int, tuple[Callable[[], None], torch.Tensor]] = {}

    @torch.inference_mode()
    def prepare(self, progress: Callable[[int, int], None]) -> None:
        """Record all sizes, largest first, so that the others fit into its memory. Nobody may hold a block yet.

        `progress` hears how many are done, and of how many.
        """
        for done, size in enumerate(reversed(self._sizes), 1):
            self._recorded[size] = self._recording(size)
            progress(done, len(self._sizes))

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Return `[places, vocabulary]` logits of a flattened batch, at these places of it."""
        count = len(batch.fed)
        if count > self._sizes[-1] or any(fed != 1 for fed in batch.fed):
            return self._decoder.logits(token_ids, positions, places, batch)
        size = self._sizes[bisect_left(self._sizes, count)]
        if size not in self._recorded:
            self._recorded[size] = self._recording(size)
        self._buffers.take(token_ids, positions, batch, size)
        play, logits = self._recorded[size]
        play()
        return logits.index_select(0, places)

    def _recording(self, size: int) -> tuple[Callable[[], None], torch.Tensor]:
        buffers, places = self._buffers, torch.arange(size, device=self._buffers.slots.device)

        def run() -> torch.Tensor:
            batch = buffers.batch(size, self._block_size)
            return self._decoder.logits(buffers.token_ids[:size], buffers.positions[:size], places, batch)

        return self._record(run)
