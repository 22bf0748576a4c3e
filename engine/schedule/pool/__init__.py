"""What the engine asks of its block manager, and its own view of the pool."""
