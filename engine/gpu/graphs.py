"""Decoding steps recorded once for each batch size, and played again: hundreds of launches become one.

A recording freezes addresses and grids, so all that changes from step to step lies in buffers of their own, and
whatever depends on lengths is decided on the device. A batch takes the next larger size; the rows that are over feed a
token to block 0, which belongs to nobody.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from engine.attention.backend import PagedBatch
from engine.model.decoder import Decoder

_WARMING_RUNS = 2  # compile kernels, and let libraries choose theirs, before anything is recorded

Result = TypeVar("Result")
Run = Callable[[], Result]


class Recorder(Protocol):
    """Records what a function launches: kernels, and addresses of memory. It keeps no tensor alive but its own.

    What the function reads or writes, and did not allocate itself, must outlive what plays it again.
    """

    def __call__(self, run: Run[Result], /) -> tuple[Callable[[], None], Result]:
        """Return what plays it again, and where its result then is."""


class Recording(Generic[Result]):
    """The launches of a function, with the function: the tensors that it names live as long as what plays them."""

    def __init__(self, run: Run[Result], record: Recorder) -> None:
        """Record what `run` launches. Nothing that it touches may be replaced later."""
        self._touched = run
        self._play, self.result = record(run)

    def __call__(self) -> None:
        """Play it again, into the same result."""
        self._play()


class CudaRecorder:
    """Records CUDA graphs that share their memory: no two of them may be played at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        # One for all: libraries keep a workspace for each stream that they ever ran on.
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Run[Result]) -> tuple[Callable[[], None], Result]:
        """Run it a few times, then record it. The current stream is the same afterwards, also if that fails."""
        current = torch.cuda.current_stream(self._device)
        self._aside.wait_stream(current)
        with torch.cuda.stream(self._aside):
            for _ in range(_WARMING_RUNS):
                run()
        current.wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        # A recording that fails leaves torch on its own stream.
        with torch.cuda.stream(current), torch.cuda.graph(graph, pool=self._pool):
            output = run()
        self._pool = self._pool or graph.pool()
        return graph.replay, output


def batch_sizes(most: int) -> list[int]:
    """Return the sizes to record for batches of up to `most` sequences: 1, 2, 4, 8, then every 16."""
    return [*(size for size in (1, 2, 4, 8) if size < most), *range(16, most, 16), most]


@dataclass(frozen=True)
class _Buffers:
    """Inputs of a step, sized for the most sequences; a recording of n reads the first n.

    `places` are those of the logits: one for each sequence.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    tables: torch.Tensor
    first: torch.Tensor
    places: torch.Tensor

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
            places=torch.arange(sequences, dtype=torch.int64, device=device),
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
        self._recorded: dict[int, Recording[torch.Tensor]] = {}

    @torch.inference_mode()
    def prepare(self, progress: Callable[[int, int], None]) -> None:
        """Record all sizes, largest first, so that the others fit into its memory. No block may be held yet.

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
        self._buffers.take(token_ids, positions, batch, size)
        if size not in self._recorded:  # after the batch was taken in: recording writes what the buffers say
            self._recorded[size] = self._recording(size)
        recording = self._recorded[size]
        recording()
        return recording.result.index_select(0, places)

    def _recording(self, size: int) -> Recording[torch.Tensor]:
        decoder, buffers, block_size = self._decoder, self._buffers, self._block_size

        def run() -> torch.Tensor:
            batch = buffers.batch(size, block_size)
            return decoder.logits(buffers.token_ids[:size], buffers.positions[:size], buffers.places[:size], batch)

        return Recording(run, self._record)
