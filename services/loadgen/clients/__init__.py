"""Clients of the servers that a load is sent to."""
