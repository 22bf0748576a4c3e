"""A soak: all services under mixed load for a long time, and the slopes of what each process holds."""
