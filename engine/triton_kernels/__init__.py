"""Kernels for NVIDIA GPUs, written in Triton, which compiles them where they first run.

All grids are fixed by what the host knows; whatever depends on the lengths of sequences is read on the device, so that
launches may be recorded in a CUDA graph. With TRITON_INTERPRET=1 in the environment the same kernels run on the CPU,
slowly: that is how they are tested where there is no GPU.
"""
