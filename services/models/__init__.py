"""Models on this machine, and the file formats they come in."""
