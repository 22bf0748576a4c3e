"""Models on this machine, and their file formats."""
