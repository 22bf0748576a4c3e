"""The layout of kept memory, and the header that describes it."""

from dataclasses import replace

import pytest
import torch

from engine.kept.header import (
    ITEM_BYTES,
    KeptIdentity,
    KeptKind,
    header_of,
    is_header,
    kept_bytes,
    kept_bytes_for,
    read_header,
)
from engine.kept.kept_memory import KeptMemory
from engine.kept.seals import Sealing

ALL = KeptKind("all", "K (3, 8) V (3, 8): 00", 2 * 2 * 3 * 8, 5, 3)
WINDOW = KeptKind("window-7", "K (3, 8) V (3, 8): 0", 2 * 3 * 8, 4, 2)
IDENTITY = KeptIdentity(
    fingerprint="f",
    boot_id="b",
    backend="cpu",
    dtype="float32",
    block_size=4,
    kinds=(ALL, WINDOW),
)


def made(identity: KeptIdentity) -> KeptMemory:
    return KeptMemory.mapped(memoryview(bytearray(kept_bytes(identity))), identity)


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_elements_have_the_size_that_they_have_in_torch(dtype: str) -> None:
    assert ITEM_BYTES[dtype] == getattr(torch, dtype).itemsize


def test_all_parts_have_their_own_bytes() -> None:
    kept = made(IDENTITY)
    for number, kind in enumerate(kept.kinds, 1):
        assert kind.host_cache is not None
        kind.cache.fill_(number)
        kind.host_cache.fill_(-number)
        for seals in kind.tiers:
            for block in range(1, len(seals) + 1):
                seals.seal(block, Sealing(b"\xff" * 32, 1, 1))
    kept.counters.resets, kept.counters.tick(), kept.counters.begin()
    assert [tuple(kind.cache.shape) for kind in kept.kinds] == [(6, 96), (5, 48)]
    for number, kind in enumerate(kept.kinds, 1):
        assert kind.host_cache is not None
        assert bool((kind.cache == number).all())
        assert bool((kind.host_cache == -number).all())
    assert [[len(seals.cached(1)) for seals in kind.tiers] for kind in kept.kinds] == [[5, 3], [4, 2]]
    assert (kept.counters.resets, kept.counters.generation) == (0, 1)


def test_a_kind_without_a_host_tier_has_no_tensor_of_it() -> None:
    kept = made(replace(IDENTITY, kinds=(replace(ALL, host_blocks=0), WINDOW)))
    assert [kind.host_cache is None for kind in kept.kinds] == [True, False]
    assert kept.kinds[0].host.cached(0) == {}


def test_tensors_begin_at_large_pages() -> None:
    memory = bytearray(kept_bytes(IDENTITY))
    kept = KeptMemory.mapped(memoryview(memory), IDENTITY)
    begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert all((kind.cache.data_ptr() - begin) % (2 << 20) == 0 for kind in kept.kinds)
    assert len(memory) == 2 * 3 * (2 << 20), "the seals of each kind, and each of its tiers, take whole pages"
    itemsize = 4
    sizes = [(one.device_blocks, one.host_blocks, one.block_elements * itemsize) for one in IDENTITY.kinds]
    assert kept_bytes_for(*sizes) == kept_bytes(IDENTITY)


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
        ("format", 9),
        ("fingerprint", "g"),
        ("boot_id", "c"),
        ("backend", "torch"),
        ("dtype", "bfloat16"),
        ("block_size", 16),
        ("kinds", (ALL,)),
        ("kinds", (ALL, replace(WINDOW, name="window-8"))),
    ],
)
def test_each_difference_is_named(name: str, value: object) -> None:
    assert IDENTITY.difference(replace(IDENTITY, **{name: value})) == name  # type: ignore[arg-type]
    assert IDENTITY.difference(IDENTITY) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("shapes", "K (8, 3) V (8, 3): 00"), ("block_elements", 24), ("device_blocks", 6), ("host_blocks", 0)],
)
def test_each_difference_of_a_kind_is_named(name: str, value: object) -> None:
    own, window = replace(ALL, **{name: value}), replace(WINDOW, **{name: value})  # type: ignore[arg-type]
    assert IDENTITY.difference(replace(IDENTITY, kinds=(own, WINDOW))) == name
    assert IDENTITY.difference(replace(IDENTITY, kinds=(ALL, window))) == f"{name} of window-7"
