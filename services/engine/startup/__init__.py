"""Puts an engine together: model, backend, kernels, and the checks before it serves."""
