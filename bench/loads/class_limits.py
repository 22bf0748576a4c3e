"""Keeps libraries to the instructions of a class of CPUs, so that a machine measures the classes below its own too."""

from engine.native import cpu_class

# Switches of oneDNN, of torch, and of MKL, with which torch multiplies.
_LIMITS = {
    "avx512-bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
# Programs with kernels of their own that keep the CPU's instructions. Under oneDNN's limit to AVX2, openvino's runtime
# model of two products in float32 names brgemm_avx2 for one and gemm_mlas for the other: MLAS is a part of openvino,
# and takes AVX512 where CPUID reports it. In bfloat16, which openvino still offers then, both are "undef_bf16": the run
# ended at a hundred times the CPU's speed, so it did not compute them.
_UNLIMITED = ("openvino", "llamacpp")


def limits_of(device: str) -> dict[str, str]:
    """Return the environment of a process; the libraries read it when they are loaded."""
    return _LIMITS.get(device, {})


def incomparable(program: str, device: str) -> str | None:
    """Return why a program cannot be compared on this machine in a class of CPUs, None if it can.

    Kept to a class below the machine's own, it would compute faster than the class can.
    """
    if program == "openvino" and device == "avx2":
        return "it has no products in bfloat16 for avx2"
    fastest = next(iter(cpu_class.supported()), None)
    if not program.startswith(_UNLIMITED) or fastest is None or device in (fastest.name, "other-cpu"):
        return None
    return f"its kernels cannot be kept to {device}"
