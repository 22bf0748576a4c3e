"""Which tokens are computed next, and in which blocks."""
