"""Kernels for NVIDIA GPUs in Triton, which compiles them at their first launch.

Grids depend only on values known on the host; lengths of sequences are read on the device, so that launches can be
captured in a CUDA graph. With TRITON_INTERPRET=1 in the environment the same kernels run slowly on the CPU, which is
how they are tested without a GPU.
"""
