"""The KV manager service."""
