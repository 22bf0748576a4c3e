"""Startup of an engine: model, backend, kernels, and checks before it serves."""
