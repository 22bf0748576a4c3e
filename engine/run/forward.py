"""The forward pass of a plan: copies, inputs, logits."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, PagedBatch
from engine.attention.upload import upload
from engine.gpu.copy_stream import CopyStream, copy_stream_for
from engine.model.decoder import Decoder
from engine.run.block_copies import BlockCopies
from engine.schedule.step_plan import PENDING, StepPlan, Work


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
        token_ids = [token for item in work for token in item.token_ids]
        positions = [position for item in work for position in range(item.start, item.end)]
        inputs = self._upload_columns(token_ids, positions, self._logit_indices(work))
        self._insert_pending(inputs[0], token_ids, work)
        return self._decoder.logits(*inputs, PagedBatch.of(work, self._block_size, self._device))

    def _upload_columns(
        self, token_ids: list[int], positions: list[int], places: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return three tensors of the decoder's integers. On a CPU they are parts of one array, which costs less.

        On a GPU they are not, because Triton compiles kernels again for tensors that are not aligned.
        """
        if self._device.type != "cpu":
            known, placed, chosen = (upload(one, torch.int64, self._device) for one in (token_ids, positions, places))
            return known, placed, chosen
        values = np.array([*token_ids, *positions, *places], dtype=self._decoder.integers)
        fed = len(token_ids)
        parts = values[:fed], values[fed : 2 * fed], values[2 * fed :]
        return torch.from_numpy(parts[0]), torch.from_numpy(parts[1]), torch.from_numpy(parts[2])

    def _logit_indices(self, work: tuple[Work, ...]) -> list[int]:
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

    def _insert_pending(self, known: torch.Tensor, token_ids: list[int], work: tuple[Work, ...]) -> None:
        """Copy the pending ones of the input token ids from the latest step, on the device."""
        pending = [item.sequence for item in work if item.token_ids == (PENDING,)]
        if pending:
            rows = self._latest.rows()
            drawn = self._latest.tokens[upload([rows[one] for one in pending], torch.int64, self._device)]
            places = [place for place, token in enumerate(token_ids) if token == PENDING]
            known[upload(places, torch.int64, self._device)] = drawn.to(known.dtype)


class _LatestTokens(NamedTuple):
    """Tokens sampled by the latest step, on the device: `tokens` `[samples]` int64, and the step's work."""

    work: Sequence[Work]
    tokens: torch.Tensor = torch.empty(0, dtype=torch.int64)

    def rows(self) -> dict[int, int]:
        """Return the first row of each sequence. Only a step launched ahead needs them."""
        sampling = [item for item in self.work if item.samples]
        places = accumulate((len(item.sample_indices) for item in sampling), initial=0)
        return {item.sequence: place for item, place in zip(sampling, places, strict=False)}
