"""The block steps that the engine sends to its block manager, and its view of the pool."""
