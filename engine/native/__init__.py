"""Kernels for the CPU in C++, compiled on the machine that they run on."""

from engine.native.build import KernelsUnavailable, build
from engine.native.decoder import NativeDecoder, runs
from engine.native.kernels import LARGEST_HEAD, Kernels

__all__ = ["LARGEST_HEAD", "Kernels", "KernelsUnavailable", "NativeDecoder", "build", "runs"]
