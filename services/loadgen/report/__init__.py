"""Reports of a run: tables, JSON and plots."""
