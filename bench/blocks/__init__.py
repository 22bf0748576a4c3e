"""Benchmarks of block management, and of the memory that blocks save."""
