"""Kernels for the CPU in C++, compiled on the machine that they run on."""

from engine.native.build import KernelsUnavailable, build
from engine.native.decoder import NativeDecoder, runs
from engine.native.kernels import MAX_HEAD_SIZE, Kernels

__all__ = ["MAX_HEAD_SIZE", "Kernels", "KernelsUnavailable", "NativeDecoder", "build", "runs"]
