"""Computes logits from the tokens of a step."""

from typing import Protocol, runtime_checkable

import numpy as np
import torch

from engine.attention.backend import AttentionBackend, PagedBatch
from engine.attention.paged_context import PagedContext
from engine.attention.upload import IntegerType
from engine.model.loaded import LoadedModel


class Decoder(Protocol):
    """Runs the steps of one model over the blocks of one attention backend."""

    integers: IntegerType
    """Type of the integers that it takes on a CPU."""

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Return `[places, vocabulary]` logits of a flattened batch, at these indices. The next step may overwrite it.

        `token_ids` and `positions`: `[tokens]`. `places`: an index may occur more than once. All int64, or `integers`.
        """


@runtime_checkable
class InPlaceDecoder(Decoder, Protocol):
    """A decoder that can write its logits into given memory."""

    def logits_into(
        self,
        out: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        batch: PagedBatch,
    ) -> None:
        """Write what `logits` would return into `out`, which is contiguous."""


class ModulesDecoder:
    """Runs the modules that transformers loaded."""

    integers: IntegerType = np.int64

    def __init__(self, loaded: LoadedModel, backend: AttentionBackend) -> None:
        self._model = loaded.model
        self._backend = backend

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Run the model on one row of tokens."""
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=places,
            paged=PagedContext(self._backend, batch),
        )
        logits: torch.Tensor = output.logits[0]
        return logits
