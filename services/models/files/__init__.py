"""Reads and checks the files of a model folder."""
