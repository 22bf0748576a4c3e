"""CPU kernels in C++, compiled on the machine that runs them."""

from engine.native.build import build
from engine.native.cpu_class import KernelsUnavailable
from engine.native.decoder import NativeDecoder, runs
from engine.native.kernels import MAX_HEAD_SIZE, Kernels

__all__ = ["MAX_HEAD_SIZE", "Kernels", "KernelsUnavailable", "NativeDecoder", "build", "runs"]
