"""Memory of tensors that are freed at the start of an engine."""

import subprocess
import sys
import threading

import psutil
import torch

from engine.native.kernels import return_freed_memory

MIB = 1 << 20


def test_memory_freed_by_a_thread_goes_back_to_the_system() -> None:
    # In a process of its own: in one with other tests' memory, the thread may fill what they have freed.
    ended = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, timeout=120, check=True)
    assert int(ended.stdout) > 32 * MIB


def _returned_bytes() -> int:
    """Free 64 MiB that a thread allocated; return how much less memory the process has after it is returned."""
    kept: list[torch.Tensor] = []

    def load() -> None:
        weights = [torch.ones(16 * 1024) for _ in range(1024)]  # 64 MiB, in parts that glibc does not map
        kept.append(torch.ones(1024))  # above them in the thread's memory
        weights.clear()

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    before: int = psutil.Process().memory_info().rss
    return_freed_memory()
    return before - psutil.Process().memory_info().rss


if __name__ == "__main__":
    sys.stdout.write(str(_returned_bytes()))
