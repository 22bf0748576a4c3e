"""Computes logits from the tokens of a step."""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from engine.attention.backend import AttentionBackend, PagedBatch
from engine.attention.paged_context import PagedContext
from engine.attention.upload import IntegerType
from engine.model.loaded import LoadedModel

_ROW_UNITS = (1, 2, 4, 8)
# Of which products are compared: the fewest rows of a unit, and numbers of units that threads share unevenly.
_UNITS_AT_ONCE = (1, 2, 3, 5, 7)
_COMPARED_ROWS = 64


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

    def __init__(self, loaded: LoadedModel, backend: AttentionBackend, row_unit: int = 1) -> None:
        """Combine the parts. Steps are padded to multiples of `row_unit` tokens."""
        self._model = loaded.model
        self._backend = backend
        self._unit = row_unit
        self._vocabulary = loaded.vocabulary_size

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Run the model on one row of tokens."""
        padded = self._padded(positions)
        output = self._model(
            input_ids=self._padded(token_ids)[None],
            position_ids=padded[None],
            use_cache=False,
            logits_to_keep=places,
            paged=PagedContext(self._backend, batch, -len(token_ids) % self._unit, padded),
        )
        logits: torch.Tensor = output.logits[0]
        if logits.shape[1] > self._vocabulary:  # of tokens that the model cannot be fed
            return logits[:, : self._vocabulary].contiguous()
        return logits

    def _padded(self, numbers: torch.Tensor) -> torch.Tensor:
        """Repeat the last number until there is a multiple of the unit."""
        missing = -len(numbers) % self._unit
        return torch.cat([numbers, numbers[-1:].expand(missing)]) if missing else numbers


def row_unit(model: Any) -> int | None:
    """Return the smallest number of rows in whose multiples products of the layers do not depend on the other rows.

    Libraries multiply few rows by other kernels, which add in another order: MKL does so where a thread has less than
    four. None: not even multiples of the largest number that is tried give equal products.
    """
    with torch.inference_mode():
        return next(
            (unit for unit in _ROW_UNITS if all(_multiplies_alike(one, unit) for one in _matrices(model))), None
        )


def _matrices(model: Any) -> Iterable[torch.nn.Module]:
    """Return one module of each shape that multiplies rows by weights. No codes follow the product of the logits."""
    head = model.get_output_embeddings()
    found = (one for one in model.modules() if isinstance(one, torch.nn.Linear | Conv1D) and one is not head)
    return {(type(one), one.weight.shape, one.bias is None): one for one in found}.values()


def _multiplies_alike(matrix: Any, unit: int) -> bool:
    inputs = matrix.weight.shape[0 if isinstance(matrix, Conv1D) else 1]
    rows = torch.randn(_COMPARED_ROWS, inputs, generator=torch.Generator().manual_seed(1)).to(matrix.weight.dtype)
    expected = matrix(rows)
    counts = (unit * units for units in _UNITS_AT_ONCE)
    return all(torch.equal(matrix(rows[:count]), expected[:count]) for count in counts)
