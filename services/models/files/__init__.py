"""The files of a model's folder, which are untrusted input: bounded reading, one schema, and a check before a start."""
