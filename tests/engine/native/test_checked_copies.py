"""Copies that compute the checksum of the bytes they read: that of the library, for blocks of any size."""

import random

import pytest
import torch
from xxhash import xxh3_64_intdigest

from blocks import Copy
from engine.attention.backend import Direction
from engine.attention.cache import CacheGeometry
from engine.native.cpu_backend import CpuBackend
from engine.native.cpu_class import NAMES
from engine.native.kernels import LEAST_CHECKED, Kernels
from tests.engine import native_kernels

# At the ends of stripes of 64 bytes and of rounds of 1,024.
SIZES = (LEAST_CHECKED, 255, 256, 257, 320, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 5000, 65_536, 368_640)


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels.kernels(request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threads", [1, 2])
def test_checked_copies_are_copies_and_have_the_checksums_of_the_library(
    kernels: Kernels, size: int, threads: int
) -> None:
    torch.manual_seed(size)
    source = torch.randint(0, 256, (6, size), dtype=torch.uint8)
    target = torch.zeros(5, size, dtype=torch.uint8)
    copies = [Copy(5, 2), Copy(1, 4), Copy(3, 3)]
    found = kernels.copy_checked(source, target, copies, threads)
    assert found == [xxh3_64_intdigest(source[one.source].numpy()) for one in copies]
    for one in copies:
        assert torch.equal(target[one.destination], source[one.source])
    assert not target[[0, 1]].any(), "other blocks are left"


def test_any_size_of_a_block_has_the_checksum_of_the_library(kernels: Kernels) -> None:
    source = random.Random(0)
    for _ in range(300):
        size = source.randrange(LEAST_CHECKED, 4000)
        rows = torch.frombuffer(bytearray(source.randbytes(2 * size)), dtype=torch.uint8).view(2, size)
        target = torch.empty_like(rows)
        assert kernels.copy_checked(rows, target, [Copy(1, 0)], 1) == [xxh3_64_intdigest(rows[1].numpy())]


@pytest.mark.parametrize("head_size", [1, 16])
def test_a_backend_checks_no_copies_of_blocks_that_are_too_small(kernels: Kernels, head_size: int) -> None:
    backend = CpuBackend(kernels, CacheGeometry.uniform(1, 1, head_size), 16, 4, host_blocks=4, threads=1)
    assert backend.checks_copies == (head_size == 16)
    if backend.checks_copies:
        backend.cache.normal_()
        assert backend.host_cache is not None
        found = backend.swap_checked([Copy(1, 2)], Direction.DEVICE_TO_HOST)
        assert torch.equal(backend.host_cache[2], backend.cache[1])
        assert found == [xxh3_64_intdigest(backend.cache[1].numpy())]
