"""Engines with an empty pool, whose KV manager is another process, or the core in the same process."""
