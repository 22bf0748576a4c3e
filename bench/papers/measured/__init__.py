"""Measurements on the CPU for figures of the papers: functions with plain JSON arguments and values."""
