"""Matrices of integers in int32 words, with scales and zeros by group of inputs: GPTQ, AWQ and AutoRound."""
