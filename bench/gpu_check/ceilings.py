"""Ceilings of the device: memory bandwidth and matrix products."""

import torch
import triton
import triton.language as tl

from bench.gpu_check.timing import Run

_WORDS = 4096  # of 4 bytes, read by one program at a time


@triton.jit
def _read(memory, sums, words, WORDS: tl.constexpr):
    """Sum up this program's share, so that all of it must be read."""
    place = tl.arange(0, WORDS)
    total = tl.zeros([WORDS], tl.float32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * WORDS, words, tl.num_programs(0) * WORDS, num_stages=3):
        total += tl.load(memory + start + place, mask=start + place < words, other=0)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


def reading(memory: torch.Tensor) -> Run:
    """Return a function that reads all of a tensor once."""
    words = memory.view(-1).view(torch.float32)
    programs = 4 if memory.device.type == "cpu" else 8 * torch.cuda.get_device_properties(0).multi_processor_count
    sums = torch.empty(programs, dtype=torch.float32, device=memory.device)
    return lambda: _read[(programs,)](words, sums, len(words), WORDS=_WORDS, num_warps=8)


def multiplying(size: int, device: torch.device) -> Run:
    """Return a function that multiplies two square matrices of bfloat16: 2 * size^3 operations."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return lambda: torch.matmul(left, right)
