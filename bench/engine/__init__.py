"""Benchmarks of the engine: kernels, speed, exactness."""

import os

# As in the engine's process, and before torch is imported: threads that wait busily slow the kernels of others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
