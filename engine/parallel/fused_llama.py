"""Runs a rank's slice of a Llama-shaped model with few launches: eleven for a layer, two of which are collectives.

A rank's product is rounded to the type of the weights, as every product is, before the ranks exchange it: half of the
bytes of float32. Few rows are gathered, and the kernel that normalizes adds the parts of all ranks to the residual, in
the order of the ranks in float32, so that one rounding follows. Many rows are reduced by the library, which rounds the
sum again at each rank that it passes, but sends a quarter of the bytes with eight ranks.
"""

import torch

from engine.attention.backend import PagedBatch
from engine.gpu.llama import LlamaDecoder, StepRows
from engine.gpu.triton_backend import TritonBackend
from engine.parallel.llama_slice import LlamaSlice
from engine.triton_kernels.embedding import embed_part

# A gather has half of the steps of a reduction, and half of the ranks' number times its bytes. By arithmetic, with some
# 1.5 us a step and 300 GB/s, both take as long at 0.9 MB with 4 ranks and at 0.6 MB with 8.
_GATHERED_BYTES = 1 << 19


class FusedParallelLlama(LlamaDecoder):
    """Runs this rank's slice of every layer over its slice of the cache."""

    def __init__(self, own: LlamaSlice, backend: TritonBackend) -> None:
        """Multiply by the weights of this rank's slice."""
        super().__init__(own.weights, backend)
        self.own = own
        """This rank's slice."""
        self._ranks = own.ranks

    def head(self, rows: StepRows, places: torch.Tensor) -> torch.Tensor:
        """Return `[places, vocabulary]` logits at rank 0; at the other ranks only their part of the vocabulary."""
        return self.own.logits(self.final(rows, places))

    def logits_into(
        self,
        out: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        batch: PagedBatch,
    ) -> None:
        """Write what `logits` would return into `out`, which is contiguous."""
        self.own.logits(self.final(self._run(token_ids, positions, batch), places), out)

    def embed(self, rows: StepRows) -> None:
        """Write the embeddings of the tokens into `rows.residual`: the sum of one rank's rows and others' zeros."""
        embed_part(self._weights.embedding, self.own.tokens.start, rows.token_ids, rows.residual)
        self._ranks.all_reduce(rows.residual)

    def summed(self, product: torch.Tensor) -> torch.Tensor:
        """Return the parts of all ranks, `[ranks, rows, hidden]`, or their sum."""
        if self._ranks.size == 2 or product.nbytes <= _GATHERED_BYTES:
            return self._ranks.all_gather(product)
        return self._ranks.all_reduce(product)
