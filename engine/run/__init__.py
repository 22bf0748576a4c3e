"""Runs steps on a model: batches, sampling, copies, records."""
