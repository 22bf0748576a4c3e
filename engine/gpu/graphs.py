"""CUDA graphs of decoding steps, captured once for each batch size: hundreds of launches become one replay.

A graph fixes addresses and grids. So inputs that change from step to step are copied into fixed buffers, and everything
that depends on lengths is computed on the device. A batch uses the next larger size; padding rows feed a token to block
0, which is never allocated.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import numpy as np
import torch

from engine.attention.backend import PagedBatch
from engine.attention.upload import IntegerType
from engine.model.decoder import Decoder

_WARMUP_RUNS = 2  # so that kernels are compiled, and libraries choose theirs, before the capture

Result = TypeVar("Result")
Run = Callable[[], Result]


class Recorder(Protocol):
    """Captures the launches of a function: kernels and memory addresses. It keeps only its own tensors alive.

    Memory that the function reads or writes without allocating it must outlive the replays.
    """

    def __call__(self, run: Run[Result], /) -> tuple[Callable[[], None], Result]:
        """Return a function that replays the launches, and their result."""


class Recording(Generic[Result]):
    """Captured launches of a function, kept together with the function so that its tensors stay alive."""

    def __init__(self, run: Run[Result], record: Recorder) -> None:
        """Capture the launches of `run`. Its tensors must not be replaced later."""
        self._touched = run
        self._replay, self.result = record(run)

    def __call__(self) -> None:
        """Replay the launches into the same result."""
        self._replay()


class CudaRecorder:
    """Captures CUDA graphs with shared memory: no two of them may run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch fails to capture into the memory of graphs of which none is left, as long as a tensor in it is.
        self._graphs: WeakSet[Any] = WeakSet()
        # One stream for all captures, because libraries keep a workspace for each stream that they used.
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Run[Result]) -> tuple[Callable[[], None], Result]:
        """Run the function a few times, then capture it. Restores the current stream, even after a failure."""
        current = torch.cuda.current_stream(self._device)
        self._capture_stream.wait_stream(current)
        with torch.cuda.stream(self._capture_stream):
            for _ in range(_WARMUP_RUNS):
                run()
        current.wait_stream(self._capture_stream)
        graph = torch.cuda.CUDAGraph()
        # A failed capture leaves torch on the capture stream. Without a stream, torch would capture on another one than
        # the first runs, where libraries have no workspace yet and would allocate it in the graph's memory.
        other = next(iter(self._graphs), None)
        captured = torch.cuda.graph(graph, pool=other and other.pool(), stream=self._capture_stream)
        with torch.cuda.stream(current), no_collection(), captured:
            output = run()
        self._graphs.add(graph)
        return graph.replay, output


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage now instead of during a capture: freeing another graph would make the capture fail.

    Around several captures it collects once, since each collection visits all objects of the process.
    """
    enabled = gc.isenabled()
    if enabled:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def batch_sizes(most: int) -> list[int]:
    """Return the batch sizes to capture for up to `most` sequences: 1, 2, 4, 8, then multiples of 16."""
    return [*(size for size in (1, 2, 4, 8) if size < most), *range(16, most, 16), most]


@dataclass(frozen=True)
class _Buffers:
    """Inputs of a step for the largest batch; a graph of n sequences reads the first n rows.

    `places` are the indices of the logits: one for each sequence.
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
        # All rows start as padding: a token at position 0 of block 0.
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
        """Copy a batch in, and turn the rows from its end to `size` into padding."""
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
        """Return the first `size` rows as a new batch, because backends may cache state by batch."""
        return PagedBatch(
            block_size=block_size,
            fed=(1,) * size,
            slots=self.slots[:size],
            first=self.first[: size + 1],
            ends=self.ends[:size],
            tables=self.tables[:size],
        )


class RecordedDecoder:
    """Replays steps in which each sequence feeds one token; other steps run on the captured decoder."""

    integers: IntegerType = np.int64

    def __init__(
        self,
        decoder: Decoder,
        record: Recorder,
        block_size: int,
        blocks: int,
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        """Allocate buffers for sequences of up to `blocks` blocks. Captures nothing yet; `sizes` are ascending."""
        self._decoder = decoder
        self._record = record
        self._block_size = block_size
        self._sizes = sizes
        self._buffers = _Buffers.allocate(sizes[-1], blocks, device)
        self._captured: dict[int, Recording[torch.Tensor]] = {}

    @torch.inference_mode()
    def prepare(self, progress: Callable[[int, int], None]) -> None:
        """Capture all sizes, largest first, so that the others fit into its memory. No block may be held yet.

        `progress` receives the number of captured sizes and their total.
        """
        for done, size in enumerate(reversed(self._sizes), 1):
            self._captured[size] = self._capture(size)
            progress(done, len(self._sizes))

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Return `[places, vocabulary]` logits of a flattened batch, at these indices."""
        count = len(batch.fed)
        if count > self._sizes[-1] or any(fed != 1 for fed in batch.fed):
            return self._decoder.logits(token_ids, positions, places, batch)
        size = self._sizes[bisect_left(self._sizes, count)]
        self._buffers.take(token_ids, positions, batch, size)
        if size not in self._captured:  # after the batch was copied in, because the capture runs on the buffers
            self._captured[size] = self._capture(size)
        recording = self._captured[size]
        recording()
        return recording.result.index_select(0, places)

    def _capture(self, size: int) -> Recording[torch.Tensor]:
        decoder, buffers, block_size = self._decoder, self._buffers, self._block_size

        def run() -> torch.Tensor:
            batch = buffers.batch(size, block_size)
            return decoder.logits(buffers.token_ids[:size], buffers.positions[:size], buffers.places[:size], batch)

        return Recording(run, self._record)
