"""Kinds of blocks at the engine: which layers share one, their caches, and how memory is split among them."""
