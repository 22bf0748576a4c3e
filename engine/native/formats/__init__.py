"""Weights as files hold them: quantized by groups, and how such files are read."""
