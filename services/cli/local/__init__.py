"""`quire serve` on this machine: its services as processes, started again when they end, and where others find them."""
