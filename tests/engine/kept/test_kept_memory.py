"""The layout of kept memory, and the header that describes it."""

from dataclasses import replace

import pytest
import torch

from engine.kept.kept_memory import (
    KeptIdentity,
    KeptMemory,
    block_bytes,
    header_of,
    is_header,
    kept_bytes,
    read_header,
)
from engine.kept.seals import Sealing

IDENTITY = KeptIdentity(
    fingerprint="f",
    boot_id="b",
    backend="cpu",
    dtype="float32",
    shapes="K (3, 8) V (3, 8): 00",
    block_elements=2 * 2 * 3 * 8,
    block_size=4,
    device_blocks=5,
    host_blocks=3,
)


def test_all_parts_have_their_own_bytes() -> None:
    kept = KeptMemory(memoryview(bytearray(kept_bytes(IDENTITY))), IDENTITY)
    assert kept.host_cache is not None
    kept.cache.fill_(1.0)
    kept.host_cache.fill_(2.0)
    for seals in (kept.device, kept.host):
        for block in range(1, len(seals) + 1):
            seals.seal(block, Sealing(b"\xff" * 32, 1, 1))
    kept.counters.resets, kept.counters.tick(), kept.counters.begin()
    assert (kept.cache.shape, kept.host_cache.shape) == ((6, 96), (4, 96))
    assert bool((kept.cache == 1.0).all())
    assert bool((kept.host_cache == 2.0).all())
    assert (len(kept.device.cached(1)), len(kept.host.cached(1))) == (5, 3)
    assert (kept.counters.resets, kept.counters.generation) == (0, 1)


def test_a_memory_without_a_host_tier_has_no_tensor_of_it() -> None:
    identity = replace(IDENTITY, host_blocks=0)
    kept = KeptMemory(memoryview(bytearray(kept_bytes(identity))), identity)
    assert kept.host_cache is None
    assert kept.host.cached(0) == {}


def test_tensors_begin_at_large_pages() -> None:
    memory = bytearray(kept_bytes(IDENTITY))
    kept = KeptMemory(memoryview(memory), IDENTITY)
    begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert (kept.cache.data_ptr() - begin) % (2 << 20) == 0
    assert block_bytes(IDENTITY) == 2 * 2 * 3 * 8 * 4


def test_a_header_has_the_identity() -> None:
    page = header_of(IDENTITY)
    assert is_header(page)
    assert read_header(page) == IDENTITY
    assert not is_header(bytes(len(page)))


def test_a_header_of_another_version_is_not_read() -> None:
    page = header_of(IDENTITY).replace(b'"kinds"', b'"newer"')
    assert is_header(page)
    assert read_header(page) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", 3),
        ("fingerprint", "g"),
        ("boot_id", "c"),
        ("backend", "torch"),
        ("dtype", "bfloat16"),
        ("shapes", "K (8, 3) V (8, 3): 00"),
        ("block_elements", 48),
        ("block_size", 16),
        ("device_blocks", 6),
        ("host_blocks", 0),
        ("kinds", ("all", "window")),
    ],
)
def test_each_difference_is_named(name: str, value: object) -> None:
    assert IDENTITY.difference(replace(IDENTITY, **{name: value})) == name  # type: ignore[arg-type]
    assert IDENTITY.difference(IDENTITY) == ""
