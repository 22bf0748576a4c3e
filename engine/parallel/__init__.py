"""One model on several ranks, each with a slice of every layer and of every block of the KV cache.

As in section 4.6 of the PagedAttention paper: rank 0 schedules and owns the block tables; the other ranks receive the
plan of each step and compute their slices of it. Block ids are the same on all ranks.
"""

from engine.parallel.ranks import OneRank, Ranks, TorchRanks
from engine.parallel.shard import Shard

__all__ = ["OneRank", "Ranks", "Shard", "TorchRanks"]
