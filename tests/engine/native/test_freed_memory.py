"""Memory of tensors that are freed at the start of an engine."""

import threading

import psutil
import torch

from engine.native.kernels import return_freed_memory

MIB = 1 << 20


def test_memory_freed_by_a_thread_goes_back_to_the_system() -> None:
    kept: list[torch.Tensor] = []

    def load() -> None:
        weights = [torch.ones(16 * 1024) for _ in range(1024)]  # 64 MiB, in parts that glibc does not map
        kept.append(torch.ones(1024))  # above them in the thread's memory
        weights.clear()

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    before = psutil.Process().memory_info().rss
    return_freed_memory()
    assert before - psutil.Process().memory_info().rss > 32 * MIB
