"""Engines, clients and requests that several benchmarks measure with."""
