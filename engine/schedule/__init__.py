"""Scheduling: which tokens the next step computes, and in which blocks."""
