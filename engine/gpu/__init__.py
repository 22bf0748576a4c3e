"""GPU parts: attention backend, fused decoder, CUDA graphs, copy stream, device check."""
