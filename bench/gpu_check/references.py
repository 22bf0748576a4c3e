"""The operations of kernels in float32, in a few lines of torch."""

import torch

from engine.attention.backend import PagedBatch, Scoring
from engine.gpu.triton_backend import TritonBackend

_ROWS = 512  # tokens of a prompt whose scores are in memory at once


def attention(
    query: torch.Tensor, backend: TritonBackend, layer: int, batch: PagedBatch, scoring: Scoring
) -> torch.Tensor:
    """Return causal attention of `[tokens, heads, key_size]` queries over the blocks of their sequences, float32."""
    size = backend.geometry.layers[layer].value_size
    found, begin = torch.empty(*query.shape[:2], size, dtype=torch.float32, device=query.device), 0
    ends = batch.ends.tolist()
    for number, fed in enumerate(batch.fed):
        key, value = (
            _contiguous(pages, batch.tables[number], ends[number])
            for pages in (backend.keys(layer), backend.values(layer))
        )
        for first in range(0, fed, _ROWS):
            rows = slice(begin + first, begin + min(first + _ROWS, fed))
            positions = torch.arange(rows.start - begin, rows.stop - begin, device=query.device) + ends[number] - fed
            found[rows] = _attend(query[rows].float(), key, value, positions, scoring)
        begin += fed
    return found


def _contiguous(pages: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return K or V of a sequence, `[kv_heads, tokens, size]` float32, from `[blocks, kv_heads, slots, size]`."""
    blocks = table[: -(-length // pages.shape[2])].long()
    return pages[blocks].float().transpose(0, 1).flatten(1, 2)[:, :length]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    tokens, heads, size = query.shape
    grouped = query.view(tokens, len(key), heads // len(key), size).permute(1, 2, 0, 3)
    scores = grouped @ key[:, None].transpose(-1, -2) * scoring.scaling
    hidden = torch.arange(key.shape[1], device=query.device) > positions[:, None]
    scores = scores.masked_fill_(hidden, float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.float().view(len(key), -1, 1, 1).expand(-1, -1, tokens, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[1]]
    return (weights @ value[:, None]).permute(2, 0, 1, 3).reshape(tokens, heads, -1)


def rotated(heads: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotate `[tokens, heads, head_size]` by `[tokens, head_size]` cosines and sines (RoFormer; Su et al., 2021)."""
    cosines, sines = (part.float().repeat(1, 2)[:, None] for part in rotations.chunk(2, dim=-1))
    left, right = heads.float().chunk(2, dim=-1)
    return heads.float() * cosines + torch.cat((-right, left), dim=-1) * sines


def normed(values: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the RMSNorm (Zhang et al., 2019) of rows."""
    return torch.nn.functional.rms_norm(values.float(), values.shape[-1:], weight.float(), epsilon)


def gated(gates: torch.Tensor) -> torch.Tensor:
    """Return SwiGLU's gate (Shazeer, 2020) of `[rows, 2 * size]` halves."""
    left, right = gates.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(left) * right


def worst_row(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error of a row, relative to the row: root mean squares. NaN if a row has one.

    A row is everything but the first dimension, so one wrong token among thousands shows.
    """
    apart, size = (
        one.float().reshape(len(expected), -1).square().mean(dim=1).sqrt()
        for one in (found.float() - expected, expected)
    )
    return float((apart / size.clamp(min=1e-9)).amax())
