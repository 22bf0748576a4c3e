"""Benchmarks: each prints its table and writes `bench/results/NAME.json`."""
