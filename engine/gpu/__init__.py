"""What a GPU runs a model's steps with, beside the attention backend: a fused decoder, and recorded launches."""
