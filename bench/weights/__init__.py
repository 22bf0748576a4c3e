"""`bench weights`: the speed, quality and memory of weights in bfloat16, 8 bits and 4 bits."""
