"""The worked examples of the PagedAttention paper and of two texts that teach it, computed by the real core."""
