"""The forward pass of a plan: copies, inputs, logits."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.attention.backend import AttentionBackend, PagedBatch
from engine.attention.block_tables import BlockTables
from engine.attention.upload import Integers, upload_together
from engine.gpu.copy_stream import CopyStream, copy_stream_for
from engine.model.decoder import Decoder
from engine.run.block_copies import BlockCopies
from engine.schedule.step_plan import PENDING, PENDING_TOKEN, StepPlan, Work

_NONE = np.zeros(0, dtype=np.int64)


class ForwardPass:
    """Computes the logits of plans, in launch order, with one decoder over the blocks of one backend."""

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        block_size: int,
        device: torch.device,
        copy_stream: CopyStream | None = None,
    ) -> None:
        """Combine the parts; the decoder uses the cache of `backend`. `copy_stream` defaults to the device's."""
        self._decoder = decoder
        self._block_size = block_size
        self._device = device
        self._latest = _LatestTokens(())
        self._tables = BlockTables(device)
        self._copies = BlockCopies(backend, copy_stream or copy_stream_for(device), block_size)

    def run(self, plan: StepPlan) -> torch.Tensor | None:
        """Start a plan's copies, and return the logits of its work, None if it has none. Raises CopyFailed.

        On a GPU all work is queued on the current stream.
        """
        self._copies.make(plan.copies)
        if not plan.work:
            return None
        self._copies.wait_for(plan.work)
        return self.logits(plan.work)

    def keep(self, work: Sequence[Work], tokens: torch.Tensor) -> None:
        """Keep the sampled tokens of the latest step, `[samples]` int64 on the device, for the step after it."""
        self._latest = _LatestTokens(work, tokens)

    def forget(self) -> None:
        """Drop the sampled tokens: the step after it has no pending ones."""
        self._latest = _LatestTokens(())

    def logits(self, work: tuple[Work, ...]) -> torch.Tensor:
        """Return `[rows, vocabulary]` logits: for each work, rows that score its prompt, then one for each sample."""
        inputs = self._inputs(work)
        tables = self._tables.update(work)
        block = tables.rows.repeat(inputs.fed), inputs.positions // self._block_size
        slots = self._tables.host[block].astype(np.int64) * self._block_size + inputs.positions % self._block_size
        narrow = self._device.type == "cpu" and self._decoder.integers is np.int32
        wide = (inputs.token_ids, inputs.positions, inputs.places)
        columns: list[Integers] = [one.astype(np.int32) if narrow else one for one in wide]
        pending = self._pending(work, inputs.token_ids)
        others = (slots, inputs.first, inputs.ends, *pending, tables.rows, tables.changed, tables.values)
        token_ids, positions, places, *rest = upload_together([*columns, *others], self._device)
        slots_of, first, ends, targets, sources, rows, changed, values = rest
        if len(pending[0]):
            token_ids[targets] = self._latest.tokens[sources].to(token_ids.dtype)
        batch = PagedBatch(
            block_size=self._block_size,
            fed=tuple(inputs.fed),
            slots=slots_of,
            first=first,
            ends=ends,
            tables=self._tables.select(rows, tables.width, changed, values),
        )
        return self._decoder.logits(token_ids, positions, places, batch)

    def _inputs(self, work: tuple[Work, ...]) -> "_Inputs":
        fed = [len(item.token_ids) for item in work]
        starts = np.array([item.start for item in work], dtype=np.int64)
        first = np.array([0, *accumulate(fed)], dtype=np.int64)
        token_ids = np.array([token for item in work for token in item.token_ids], dtype=np.int64)
        positions = np.arange(len(token_ids)) - (first[:-1] - starts).repeat(fed)
        if any(item.to_score for item in work):
            places = np.array(_logit_indices(work), dtype=np.int64)
        else:
            places = (first[1:] - 1).repeat([len(item.sample_indices) if item.samples else 0 for item in work])
        return _Inputs(fed, token_ids, positions, places, first.astype(np.int32), (starts + fed).astype(np.int32))

    def _pending(
        self, work: tuple[Work, ...], token_ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the indices of pending tokens in the flattened batch, and of these among the latest step's tokens."""
        pending = [item.sequence for item in work if item.token_ids == PENDING_TOKEN]
        if not pending:
            return _NONE, _NONE
        rows = self._latest.rows()
        return (token_ids == PENDING).nonzero()[0], np.array([rows[one] for one in pending], dtype=np.int64)


class _Inputs(NamedTuple):
    """The inputs of a step: `fed` is the number of tokens of each work; see PagedBatch and Decoder."""

    fed: list[int]
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    places: NDArray[np.int64]
    first: NDArray[np.int32]
    ends: NDArray[np.int32]


def _logit_indices(work: tuple[Work, ...]) -> list[int]:
    """Return the indices in the flattened batch whose logits are needed."""
    places: list[int] = []
    fed = 0
    for item in work:
        if part := item.to_score:
            first = fed + part.position - 1 - item.start
            places += range(first, first + len(part.token_ids))
        fed += len(item.token_ids)
        if item.samples:
            places += [fed - 1] * len(item.sample_indices)
    return places


class _LatestTokens(NamedTuple):
    """Tokens sampled by the latest step, on the device: `tokens` `[samples]` int64, and the step's work."""

    work: Sequence[Work]
    tokens: torch.Tensor = torch.empty(0, dtype=torch.int64)

    def rows(self) -> dict[int, int]:
        """Return the first row of each sequence. Only a step launched ahead needs them."""
        sampling = [item for item in self.work if item.samples]
        places = accumulate((len(item.sample_indices) for item in sampling), initial=0)
        return {item.sequence: place for item, place in zip(sampling, places, strict=False)}
