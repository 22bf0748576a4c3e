"""What `compressed_tensors.py` is made of."""
