"""Traces of requests across the services."""
