"""Benchmarks of block management, and of what blocks save."""
