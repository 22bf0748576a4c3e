"""What came of a run, for people and programs: tables, JSON, pictures."""
