"""The log of a process, and its relay in a container."""
