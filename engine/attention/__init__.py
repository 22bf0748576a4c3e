"""Attention over K and V in blocks."""

from engine.attention.backend import AttentionBackend, PagedBatch
from engine.attention.torch_backend import TorchBackend

__all__ = ["AttentionBackend", "PagedBatch", "TorchBackend"]
