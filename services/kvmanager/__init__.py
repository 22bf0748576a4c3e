"""The KV manager as a service."""
