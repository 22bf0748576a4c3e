"""Workloads: prompts, lengths, arrivals."""
