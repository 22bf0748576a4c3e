"""Guided decoding: languages, and the constraints compiled from them."""
