"""GGUF files: their header, names and blocks of quantized weights."""
