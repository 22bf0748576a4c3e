"""The command `quire`."""
