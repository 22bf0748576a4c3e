"""What came of a run: statistics, tables, pictures."""
