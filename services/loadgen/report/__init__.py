"""Reports of a run: tables, JSON and pictures."""
