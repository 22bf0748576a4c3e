"""Compares the contents of cached blocks with transformers' computation from the tokens of their keys."""

from pathlib import Path

import torch
from transformers import DynamicCache

import kvmanager
from blocks import Step, StepItem, block_key, root_key
from engine.attention import TorchBackend
from tests.reference import reference_model

# Of the largest number in a layer's K or V: float32 sums in another order differ by less, other contents by far more.
TOLERANCE = 1e-4

Tokens = tuple[int, ...]


class CommittedChains:
    """Observes every Step with its result, and maps each key to all tokens of its prefix."""

    def __init__(self, block_size: int, model_fingerprint: str = "model") -> None:
        self._block_size = block_size
        self._fingerprint = model_fingerprint
        self._committed: dict[int, tuple[bytes, Tokens]] = {}
        self.tokens: dict[bytes, Tokens] = {}

    def __call__(self, step: Step, applied: kvmanager.AppliedStep) -> None:
        refused = applied.result.refused
        for position, commit in enumerate(step.commits):
            assert (StepItem.COMMIT, position) not in refused
            salt, tokens = self._committed[commit.sequence]
            tokens = (*tokens, *commit.token_ids)
            self._committed[commit.sequence] = (salt, tokens)
            self._remember(salt, tokens)
        assert all(seal.key in self.tokens for seal in applied.sealed), "a key has committed tokens"
        for position, fork in enumerate(step.forks):
            if (StepItem.FORK, position) not in refused:
                salt, tokens = self._committed[fork.parent]
                self._committed[fork.child] = (salt, tokens[: fork.length])
        cached = {change.sequence: change.cached_tokens for change in applied.result.tables}
        for position, allocate in enumerate(step.allocates):
            if (StepItem.ALLOCATE, position) not in refused:
                tokens = tuple(allocate.token_ids[: cached[allocate.sequence]])
                self._committed[allocate.sequence] = (allocate.salt, tokens)

    def _remember(self, salt: bytes, tokens: Tokens) -> None:
        key = root_key(self._fingerprint, salt)
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            key = block_key(key, tokens[end - self._block_size : end])
            self.tokens[key] = tokens[:end]


def check_cached_blocks(folder: Path, pool: kvmanager.Pool, backend: TorchBackend, chains: CommittedChains) -> int:
    """Compare every block at count 0 that has a key; return how many there are."""
    tokens_of = {
        block: chains.tokens[key]
        for block in pool.device.eviction_order()
        if (key := pool.device.key(block)) is not None
    }
    expected: dict[Tokens, torch.Tensor] = {}
    for block, tokens in sorted(tokens_of.items(), key=lambda item: len(item[1]), reverse=True):
        if tokens not in expected:
            expected |= _contents_along(folder, tokens, pool.spec.block_size)
        held = [(backend.keys(layer)[block], backend.values(layer)[block]) for layer in range(len(expected[tokens]))]
        _compare(block, torch.stack([torch.stack(parts) for parts in held]), expected[tokens])
    return len(tokens_of)


def _contents_along(folder: Path, tokens: Tokens, block_size: int) -> dict[Tokens, torch.Tensor]:
    """Return the contents of the last block of each prefix: `[layers, 2, slots, kv_heads, head_size]`."""
    cache = DynamicCache()
    with torch.inference_mode():
        reference_model(folder)(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    whole = torch.stack([torch.stack((layer.keys[0], layer.values[0])).transpose(1, 2) for layer in cache.layers])
    return {tokens[:end]: whole[:, :, end - block_size : end] for end in range(block_size, len(tokens) + 1, block_size)}


def _compare(block: int, held: torch.Tensor, expected: torch.Tensor) -> None:
    off = (held - expected).abs().amax((2, 3, 4)) / expected.abs().amax((2, 3, 4))
    assert off.max() < TOLERANCE, f"block {block} differs from its key's tokens by {off.tolist()} [layer][K, V]"
