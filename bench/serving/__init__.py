"""Benchmarks of the whole system behind a gateway."""
