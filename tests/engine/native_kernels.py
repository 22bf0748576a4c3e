"""The CPU kernels of a class, compiled once for all tests."""

import pytest

from engine.native.build import build
from engine.native.cpu_class import KernelsUnavailable, select
from engine.native.kernels import Kernels
from services.models.model_store import default_cache


def kernels(name: str = "auto") -> Kernels:
    """Load the kernels of a class; skip the test if this CPU cannot run them or there is no compiler."""
    try:
        cpu = select(name)
        return Kernels(build(default_cache().parent / "kernels", cpu), cpu)
    except KernelsUnavailable as missing:
        pytest.skip(f"the CPU kernels cannot be built: {missing}")
