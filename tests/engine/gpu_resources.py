"""What a program of a compiled kernel occupies, and what the processors of GPUs have.

Limits: CUDA C++ Programming Guide, technical specifications by compute capability (8.0: A100; 9.0: H100, H200; 10.0:
B200).
"""

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

_REGISTERS = 65536  # of a processor, and the most of one program
_REGISTER_UNIT = 8  # a thread's registers are allocated in these
_THREADS = 2048  # of a processor
_RESERVED = 1024  # bytes of shared memory of each program for the system


class Processor(NamedTuple):
    """Bytes of shared memory: of one program at most, and of all that run at a time."""

    program_shared: int
    shared: int


# By compute capability.
PROCESSORS = {
    80: Processor(163 << 10, 164 << 10),
    90: Processor(227 << 10, 228 << 10),
    100: Processor(227 << 10, 228 << 10),
}


class Resources(NamedTuple):
    """A program of a compiled kernel. `stack`: bytes of local memory of a thread, for spilled registers."""

    capability: int
    kernel: str
    shared: int
    registers: int
    stack: int
    threads: int

    @property
    def programs(self) -> int:
        """Return how many programs run on one processor at a time; 0 if none can be launched."""
        limits = PROCESSORS[self.capability]
        if self.shared > limits.program_shared:
            return 0
        of_a_thread = -(-max(self.registers, 1) // _REGISTER_UNIT) * _REGISTER_UNIT
        return min(
            limits.shared // (self.shared + _RESERVED),
            _REGISTERS // (of_a_thread * self.threads),
            _THREADS // self.threads,
        )

    @classmethod
    def of(cls, capability: int, kernel: str, compiled: Any, cuobjdump: str) -> "Resources":
        """Read a compiled kernel of Triton: shared memory from its metadata, the rest from the binary."""
        with TemporaryDirectory() as folder:
            binary = Path(folder) / "kernel.cubin"
            binary.write_bytes(compiled.asm["cubin"])
            command = [cuobjdump, "-res-usage", str(binary)]
            used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", used)
        assert found, used
        registers, stack = map(int, found.groups())
        metadata = compiled.metadata
        return cls(capability, kernel, metadata.shared, registers, stack, 32 * metadata.num_warps)
