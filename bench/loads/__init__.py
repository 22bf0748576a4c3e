"""Engines, clients and requests that several benchmarks share."""
