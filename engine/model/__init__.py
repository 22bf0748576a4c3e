"""Loads a model, and plans the memory it needs."""
