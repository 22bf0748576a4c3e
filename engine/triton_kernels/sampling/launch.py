"""Chooses one token for each row of logits, in two launches, four if rows have filters, five with top_n_sigma.

The logits are read once in their own type, three times for rows with filters, five times with top_n_sigma. There are no
atomic operations, so the same logits give the same tokens.
"""

from typing import Any, NamedTuple

import torch
import triton

from engine.triton_kernels.sampling.candidates import CUTS, bound_spread, gather, measure
from engine.triton_kernels.sampling.choose import choose
from engine.triton_kernels.sampling.scan import ROW_WORDS, scan
from engine.triton_kernels.tuning import INTERPRETED

__all__ = ["ROW_WORDS", "Batch", "choose_tokens"]

_TILE = 1 << 16 if INTERPRETED else 4096  # tokens of one program
_CHUNK = 1 << 16 if INTERPRETED else 1024  # candidates that one program reads at a time
# Products and sums are rounded one by one, as on the CPU.
_OPTIONS: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}


class Batch(NamedTuple):
    """Rows to sample.

    `logits`: `[rows, vocabulary]`, of any float type. `rows`: `[rows, ROW_WORDS]` int32, the parameters that
    engine.run.device_sampler packs. `changed`: `[changed rows, vocabulary]` float32, read instead of the logits by rows
    with a source. `counts`: `[slots, vocabulary]` int16, see engine.run.token_counts. `filtered`: number of rows with
    filters. `spread`: a row has top_n_sigma.
    """

    logits: torch.Tensor
    rows: torch.Tensor
    changed: torch.Tensor | None
    counts: torch.Tensor
    filtered: int
    spread: bool = False


def choose_tokens(batch: Batch) -> torch.Tensor:
    """Return `[rows]` int64 token ids, and add each to the counts of its slot, where the row says so."""
    logits = batch.logits if batch.logits.stride(-1) == 1 else batch.logits.contiguous()
    rows, vocabulary = logits.shape
    results = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return results
    tiles = triton.cdiv(vocabulary, _TILE)
    tops, bests = (torch.empty(rows, tiles, dtype=kind, device=logits.device) for kind in (torch.int32, torch.int64))
    words, floats = batch.rows, batch.rows.view(torch.float32)
    source = (logits, floats if batch.changed is None else batch.changed, batch.counts, words, floats)
    sizes: dict[str, Any] = {"TILE": _TILE, "INTERPRETED": INTERPRETED, **_OPTIONS}
    stride, padded = logits.stride(0), triton.next_power_of_2(tiles)
    scan[(tiles, rows)](*source, tops, bests, vocabulary, stride, **sizes)
    lists = _Lists.allocate(batch.filtered, tiles, vocabulary, logits.device)
    if batch.spread:
        bound_spread[(rows,)](*source, tops, vocabulary, stride, tiles, TILES=padded, **sizes)
    if batch.filtered:
        table = (tops, lists.within, lists.masses)
        measure[(tiles, rows)](*source, *table, vocabulary, stride, TILES=padded, **sizes)
        gather[(tiles, rows)](*source, *table, *lists[2:], vocabulary, stride, TILES=padded, **sizes)
    found = (batch.counts, words, floats, tops, bests, *lists[2:], results, vocabulary, tiles)
    choose[(rows,)](*found, FILTERS=batch.filtered > 0, TILES=padded, CHUNK=_CHUNK, **_OPTIONS)
    return results


class _Lists(NamedTuple):
    """Candidates of the rows with filters, and the measurements of their tiles within each cut."""

    within: torch.Tensor
    masses: torch.Tensor
    lengths: torch.Tensor
    totals: torch.Tensor
    distances: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, tiles: int, vocabulary: int, device: torch.device) -> "_Lists":
        shapes = ((rows, CUTS, tiles),) * 2 + ((rows,),) * 2 + ((rows, vocabulary),) * 2
        kinds = (torch.int32, torch.float32, torch.int32, torch.float32, torch.float32, torch.int32)
        return cls(*(torch.empty(shape, dtype=kind, device=device) for shape, kind in zip(shapes, kinds, strict=True)))
