"""Quantized weights in safetensors files: what a folder declares, and one module for each method of storing them."""
