"""The processes of one model's ranks: how they start, what rank 0 and the others send each other, how they end."""
