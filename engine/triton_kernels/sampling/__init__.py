"""Sampling on the device: counter-based noise, filters without a sort, token counts."""
