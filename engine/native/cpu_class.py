"""Classes of x86 CPUs by their vector instructions. Each class has a build of the kernels."""

import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

# The flags of x86-64-v3 and v4 in /proc/cpuinfo.
_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm", "xsave"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


class KernelsUnavailable(Exception):
    """The kernels cannot run or be built here; the message says why."""


class CpuClass(NamedTuple):
    """A class of CPUs: the compiler flags of its build, and the required flags of /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


# Loops have vectors of 64 bytes, as the kernels' own: loads of 64 bytes wait for shorter stores before them.
_WIDE = ("-march=x86-64-v4", "-mprefer-vector-width=512")
# The fastest first. A CPU of a class can run the builds of all later ones.
CLASSES = (
    CpuClass(
        "amx",
        (
            *_WIDE,
            "-mtune=sapphirerapids",
            "-mavx512bf16",
            "-mavx512vnni",
            "-mamx-tile",
            "-mamx-bf16",
            "-mamx-int8",
        ),
        _V4 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
    ),
    CpuClass(
        "avx512-bf16",
        (*_WIDE, "-mavx512bf16", "-mavx512vnni"),
        _V4 | {"avx512_bf16", "avx512_vnni"},
    ),
    CpuClass("avx2", ("-march=x86-64-v3",), _V3),
)
# Environment variable that selects a slower class, such as avx2, so that one machine runs the builds of several.
VARIABLE = "QUIRE_CPU_CLASS"
NAMES = tuple(one.name for one in CLASSES)


def supported() -> tuple[CpuClass, ...]:
    """Return the classes whose builds this CPU can run, the fastest first."""
    here = instructions()
    return tuple(one for one in CLASSES if one.needs <= here)


def select(name: str = "auto") -> CpuClass:
    """Return the fastest class of this CPU, or the named one. Raises KernelsUnavailable if the CPU cannot run it."""
    classes = supported()
    if not classes:
        raise KernelsUnavailable(f"this CPU ({platform.machine()}) has no AVX2, FMA and F16C")
    found = next((one for one in classes if name in ("auto", one.name)), None)
    if found is None:
        raise KernelsUnavailable(f"this CPU is of class {classes[0].name} and cannot run {name}")
    return found


@cache
def instructions() -> frozenset[str]:
    """Return the CPU's feature flags as Linux reports them; empty on other systems."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
