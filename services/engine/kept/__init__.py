"""An engine's kept memory: its file, what it holds after an engine's death, and what each block step changes in it."""
