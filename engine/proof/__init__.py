"""Compares blocks with their checksums, and with recomputed ones, before a step reads them."""
