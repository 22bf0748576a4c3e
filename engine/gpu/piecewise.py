"""Piecewise CUDA graphs of steps with prompts, as in vLLM: what lies between two attentions is captured, once a size.

The grid of attention follows from the lengths of the prompts, so attention is launched between the pieces. What a piece
launches follows from the number of tokens alone. A step uses the next larger size; padding rows feed a token to block
0, which is never allocated, and no attention reads or writes them. The head is launched too: it has a row for each of
the step's logits, not for each token.

Where it pays: without a graph the host takes some 80 us to launch a layer, as published and not measured here: five
Triton kernels with 12 us each, four matrix products with 5 us. With fewer tokens than fill that time, the device waits
for the host. Up to 256 tokens the device has longer to read the layers' matrices than to multiply by them (790 T
operations over 3.08 TB/s, two of each for an element of 16 bits), so padding costs nothing.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from engine.attention.backend import PagedBatch
from engine.attention.upload import IntegerType
from engine.gpu.graphs import Recorder, Recording, capturing, no_collection
from engine.gpu.llama import LlamaDecoder, StepRows
from engine.model.decoder import Decoder

_READING = 256  # tokens up to which the matrices of 16-bit types take longer to read than to multiply
# At most a fifth of the rows is padding where it costs time.
_SIZES = (16, 32, 64, 128, 192, *(base + base // 4 * part for base in (256, 512, 1024) for part in range(4)), 2048)
_LAUNCH_SECONDS = 80e-6  # of one layer on the host
_OPERATIONS_PER_SECOND = 790e12  # bfloat16 on an H100; on a slower GPU padding costs time earlier, at most a fifth


def step_sizes(layers: int, matrix_elements: int, token_budget: int) -> list[int]:
    """Return the numbers of tokens to capture, ascending, for a model whose layers have so many elements together.

    The largest is the budget, or where launching all layers takes as long as computing them: 256 to 2,048 tokens.
    """
    launched = layers * _LAUNCH_SECONDS * _OPERATIONS_PER_SECOND / (2 * matrix_elements)
    most = min(token_budget, max(size for size in _SIZES if size <= max(launched, _READING)))
    return [*(size for size in _SIZES if size < most), most]


@dataclass(frozen=True)
class _Pieces:
    """The captured pieces of one size, and the rows that they read and write: one piece before each attention."""

    rows: StepRows
    before_attention: Sequence[Recording[None]]
    end: Recording[None]


class PiecewiseDecoder:
    """Replays steps with prompts by pieces if they have few tokens; others run on another decoder of the same cache."""

    integers: IntegerType = np.int64

    def __init__(self, decoder: LlamaDecoder, others: Decoder, record: Recorder, sizes: Sequence[int]) -> None:
        """Allocate the rows of the largest size. Captures nothing yet; `sizes` are ascending."""
        self._decoder = decoder
        self._others = others
        self._record = record
        self._sizes = sizes
        self._rows = decoder.empty_rows(sizes[-1])
        self._captured: dict[int, _Pieces] = {}

    @property
    def captured(self) -> list[int]:
        """The captured sizes, ascending."""
        return sorted(self._captured)

    @torch.inference_mode()
    def prepare(self, progress: Callable[[int, int], None], has_time: Callable[[], bool] = lambda: True) -> None:
        """Capture the sizes, largest first, so that the others fit into its memory, while `has_time`.

        `progress` receives the number of captured sizes and their total. Steps of a size left out run elsewhere.
        Raises CaptureFailed.
        """
        for done, size in enumerate(reversed(self._sizes), 1):
            if not has_time():
                return
            with no_collection(), capturing(size, done, len(self._sizes)):
                self._captured[size] = self._capture(self._rows.up_to(size))
            progress(done, len(self._sizes))

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Return `[places, vocabulary]` logits of a flattened batch, at these indices."""
        pieces = self._pieces_for(batch, len(token_ids))
        if pieces is None:
            return self._others.logits(token_ids, positions, places, batch)
        _take(pieces.rows, token_ids, positions, batch.slots)
        for layer, piece in enumerate(pieces.before_attention):
            piece()
            self._decoder.attend(layer, pieces.rows, batch)
        pieces.end()
        return self._decoder.head(pieces.rows, places)

    def _pieces_for(self, batch: PagedBatch, tokens: int) -> _Pieces | None:
        """Return the pieces of a step with prompts, or None if it has none or its size was not captured."""
        number = bisect_left(self._sizes, tokens)
        if number == len(self._sizes) or max(batch.fed, default=1) <= 1:
            return None
        return self._captured.get(self._sizes[number])

    def _capture(self, rows: StepRows) -> _Pieces:
        decoder, last = self._decoder, self._decoder.layers - 1
        begin = Recording(partial(decoder.begin, rows), self._record)
        between = [Recording(partial(decoder.follow, layer, rows), self._record) for layer in range(last)]
        return _Pieces(rows, [begin, *between], Recording(partial(decoder.end, rows), self._record))


def _take(rows: StepRows, token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
    """Copy a step's inputs into fixed rows, and turn the rows behind them into padding."""
    count = len(token_ids)
    for buffer, values in ((rows.token_ids, token_ids), (rows.positions, positions), (rows.slots, slots)):
        buffer[:count].copy_(values)
        buffer[count:].zero_()
