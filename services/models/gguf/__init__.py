"""Tokenizers in GGUF files."""
