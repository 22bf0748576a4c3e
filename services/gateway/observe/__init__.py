"""Observers of requests: reports, metrics, accounting. Nothing here changes a request."""
