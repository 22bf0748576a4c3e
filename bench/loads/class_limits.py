"""Keeps libraries to the instructions of a class of CPUs, so that a machine measures the classes below its own too."""

# Switches of oneDNN, of torch, and of MKL, with which torch multiplies. Kernels that openvino selects without oneDNN
# keep those of the CPU.
_LIMITS = {
    "avx512-bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}


def limits_of(cpu_class: str) -> dict[str, str]:
    """Return the environment of a process; the libraries read it when they are loaded."""
    return _LIMITS.get(cpu_class, {})
