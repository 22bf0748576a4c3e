"""Executes plans on one device: copies, forward, sampling."""

import torch

from engine.attention.backend import AttentionBackend, PagedBatch
from engine.attention.interface import PagedContext
from engine.block_copies import BlockCopies
from engine.copy_stream import CopyStream, copy_stream_for
from engine.model import LoadedModel
from engine.plan import StepPlan, Work
from engine.sampling import Draw, sample


class ModelRunner:
    """Runs a model's steps over the blocks of one attention backend."""

    def __init__(
        self, loaded: LoadedModel, backend: AttentionBackend, block_size: int, copy_stream: CopyStream | None = None
    ) -> None:
        """Put the parts together. Without a `copy_stream` it is the one for the model's device."""
        self._loaded = loaded
        self._backend = backend
        self._block_size = block_size
        self._device: torch.device = loaded.model.device
        self._copies = BlockCopies(backend, copy_stream or copy_stream_for(self._device), block_size)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[int]:
        """Copy blocks, compute the fed tokens, and return a token id for each work that samples, in order.

        Raises CopyFailed.
        """
        self._copies.make(plan.copies)
        if not plan.work:
            return []
        self._copies.wait_for(plan.work)
        logits = self.forward(plan.work)
        draws = [
            Draw(work.sampling, index, work.end, work.rules)
            for work in plan.work
            if work.samples
            for index in work.sample_indices
        ]
        return sample(logits, draws) if draws else []

    def forward(self, work: tuple[Work, ...]) -> torch.Tensor:
        """Return `[sampling work, vocabulary]` logits of the last token of each work that samples."""
        token_ids = [token for item in work for token in item.token_ids]
        positions = [position for item in work for position in range(item.start, item.end)]
        batch = PagedBatch.of(work, self._block_size, self._device)
        output = self._loaded.model(
            input_ids=self._row(token_ids),
            position_ids=self._row(positions),
            use_cache=False,
            logits_to_keep=self._last_tokens(work),
            paged=PagedContext(self._backend, batch),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _last_tokens(self, work: tuple[Work, ...]) -> torch.Tensor:
        """Return the positions in the flattened batch whose logits are sampled."""
        ends, fed = [], 0
        for item in work:
            fed += len(item.token_ids)
            if item.samples:
                ends += [fed - 1] * len(item.sample_indices)
        return torch.tensor(ends, dtype=torch.int64, device=self._device)

    def _row(self, values: list[int]) -> torch.Tensor:
        return torch.tensor([values], dtype=torch.int64, device=self._device)
