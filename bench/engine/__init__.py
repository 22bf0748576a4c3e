"""Benchmarks of the engine: kernels, speed, exactness."""
