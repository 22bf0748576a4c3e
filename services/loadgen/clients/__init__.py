"""Clients of the measured servers."""
