"""Renders chat templates in a process with limits."""
