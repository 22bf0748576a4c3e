"""Plans a step: which sequences compute how many tokens."""
