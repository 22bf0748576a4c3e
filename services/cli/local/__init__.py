"""`quire serve` on this machine: its services as processes, their restarts, and their addresses for other commands."""
