"""The CPU kernels of a class, compiled once for all tests."""

import pytest

from engine.native.build import build
from engine.native.cpu_class import KernelsUnavailable, select
from engine.native.kernels import Kernels
from services.models.model_store import default_cache

FOLDER = default_cache().parent / "kernels"


def device_name() -> str:
    """Return what an engine calls this CPU: its class, or "cpu" if the kernels cannot run here."""
    try:
        build(FOLDER, select())
        return select().name
    except KernelsUnavailable:
        return "cpu"


def kernels(name: str = "auto") -> Kernels:
    """Load the kernels of a class; skip the test if this CPU cannot run them or there is no compiler."""
    try:
        cpu = select(name)
        return Kernels(build(FOLDER, cpu), cpu)
    except KernelsUnavailable as missing:
        pytest.skip(f"the CPU kernels cannot be built: {missing}")
