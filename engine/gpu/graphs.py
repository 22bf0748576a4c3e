"""CUDA graphs of decoding steps, captured once for each batch size: hundreds of launches become one replay.

A graph fixes addresses and grids. So inputs that change from step to step are copied into fixed buffers, and everything
that depends on lengths is computed on the device. A batch uses the next larger size; padding rows feed a token to block
0, which is never allocated. All sizes write their logits into the first rows of one buffer.
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
from engine.model.decoder import Decoder, InPlaceDecoder

_WARMUP_RUNS = 2  # so that kernels are compiled, and libraries choose theirs, before the capture

Result = TypeVar("Result")
Run = Callable[[], Result]
_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]  # of a decoder's step, in the order of arguments


class CaptureFailed(RuntimeError):
    """A size cannot be captured; the message says which one of how many, and why."""


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


@contextmanager
def capturing(size: int, number: int, of: int) -> Iterator[None]:
    """Reraise errors of torch as CaptureFailed, with the size that is captured and its number of how many."""
    try:
        yield
    except RuntimeError as failure:
        raise CaptureFailed(f"the size {size}, number {number} of {of}: {failure}") from failure


def batch_sizes(most: int) -> list[int]:
    """Return the batch sizes to capture for up to `most` sequences: 1, 2, 4, 8, then multiples of 16."""
    return [*(size for size in (1, 2, 4, 8) if size < most), *range(16, most, 16), most]


@dataclass(frozen=True)
class _Buffers:
    """Inputs of a step for the largest batch; a graph of n sequences reads the first n rows.

    `places` are the indices of the logits, as many as the graph has sequences.
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
            places=torch.zeros(sequences, dtype=torch.int64, device=device),
        )

    def take(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch, size: int
    ) -> None:
        """Copy a batch in, and turn the rows from its end to `size` into padding."""
        count, width = batch.tables.shape
        buffers = (self.token_ids, self.positions, self.places, self.slots, self.ends)
        given = (token_ids, positions, places, batch.slots, batch.ends)
        for buffer, values, over in zip(buffers, given, (0, 0, 0, 0, 1), strict=True):
            buffer[: len(values)].copy_(values)
            buffer[len(values) : size].fill_(over)
        self.tables[:count, :width].copy_(batch.tables)
        self.tables[count:size, 0].fill_(0)

    def inputs(self, size: int, block_size: int) -> _Inputs:
        """Return the first `size` rows; the batch is new, because backends may cache state by batch."""
        batch = PagedBatch(
            block_size=block_size,
            fed=(1,) * size,
            slots=self.slots[:size],
            first=self.first[: size + 1],
            ends=self.ends[:size],
            tables=self.tables[:size],
        )
        return self.token_ids[:size], self.positions[:size], self.places[:size], batch


class RecordedDecoder:
    """Replays steps in which each sequence feeds one token; other steps run on the captured decoder.

    The logits of a replayed step are the first rows of one buffer, which the next replay overwrites: work that reads
    them must be queued before, on the stream of the steps.
    """

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
        """Allocate inputs for sequences of up to `blocks` blocks. Captures nothing yet; `sizes` are ascending."""
        self._decoder = decoder
        self._record = record
        self._block_size = block_size
        self._sizes = sizes
        self._buffers = _Buffers.allocate(sizes[-1], blocks, device)
        self._output: torch.Tensor | None = None
        self._captured: dict[int, Recording[torch.Tensor]] = {}

    @torch.inference_mode()
    def prepare(self, progress: Callable[[int, int], None]) -> None:
        """Capture all sizes, largest first, so that the others fit into its memory. No block may be held yet.

        `progress` receives the number of captured sizes and their total. Raises CaptureFailed.
        """
        for done, size in enumerate(reversed(self._sizes), 1):
            with capturing(size, done, len(self._sizes)):
                self._captured[size] = self._capture(size)
            progress(done, len(self._sizes))

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Return `[places, vocabulary]` logits of a flattened batch, at these indices, until the next step's."""
        rows = max(len(batch.fed), len(places))
        if rows > self._sizes[-1] or any(fed != 1 for fed in batch.fed):
            return self._decoder.logits(token_ids, positions, places, batch)
        size = self._sizes[bisect_left(self._sizes, rows)]
        self._buffers.take(token_ids, positions, places, batch, size)
        if size not in self._captured:  # after the batch was copied in, because the capture runs on the buffers
            self._captured[size] = self._capture(size)
        recording = self._captured[size]
        recording()
        return recording.result[: len(places)]

    def _capture(self, size: int) -> Recording[torch.Tensor]:
        # The captured function does not refer to this object, which is freed without a collection then.
        decoder, buffers, block_size = self._decoder, self._buffers, self._block_size
        if self._output is None:
            self._output = _allocated_output(decoder, buffers.inputs(self._sizes[0], block_size), self._sizes[-1])
        output = self._output[:size]

        def run() -> torch.Tensor:
            _write_logits(decoder, buffers.inputs(size, block_size), output)
            return output

        return Recording(run, self._record)


def _write_logits(decoder: Decoder, inputs: _Inputs, output: torch.Tensor) -> None:
    if isinstance(decoder, InPlaceDecoder):
        decoder.logits_into(output, *inputs)
    else:
        output.copy_(decoder.logits(*inputs))


def _allocated_output(decoder: Decoder, inputs: _Inputs, sequences: int) -> torch.Tensor:
    """Return memory for the logits of `sequences` sequences; a launched step shows their number and type."""
    logits = decoder.logits(*inputs)
    return logits.new_empty(sequences, logits.shape[1])
