"""Guided decoding: grammars, and the constraints compiled from them."""
