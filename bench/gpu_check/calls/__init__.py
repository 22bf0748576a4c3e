"""`make gpu-first`: the first half hour on a GPU, as three calls of at most ten minutes."""
