"""Blocks of the torch backend, and the layout of batches. test_backends.py compares its attention with float64."""

from math import prod

import pytest
import torch

from blocks import Copy
from engine.attention import PagedBatch, TorchBackend
from engine.attention.backend import Direction, Scoring
from engine.attention.cache import CacheGeometry
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from tests.engine.paged_case import CPU, naive_attention


def test_the_reference_depends_on_scaling_window_softcap_and_heads() -> None:
    torch.manual_seed(0)
    key, value = torch.randn(2, 20, 2, 8, dtype=torch.float64)
    query = torch.randn(20, 4, 8, dtype=torch.float64)
    plain = naive_attention(query, key, value, Scoring(0.25))
    for other in (Scoring(0.3), Scoring(0.25, 19), Scoring(0.25, None, 2.0)):
        assert (naive_attention(query, key, value, other) - plain).abs().max() > 0.01
    assert (naive_attention(query.flip(1), key, value, Scoring(0.25)) - plain.flip(1)).abs().max() > 0.01


class TestBlocks:
    @pytest.fixture
    def backend(self) -> TorchBackend:
        backend = TorchBackend(CacheGeometry.uniform(3, 2, 4), block_size=4, device_blocks=6, host_blocks=4)
        backend.cache.copy_(torch.arange(backend.cache.numel()).view_as(backend.cache))
        return backend

    def test_a_write_changes_its_own_slots_of_its_own_layer_and_attending_changes_none(
        self, backend: TorchBackend
    ) -> None:
        before = backend.cache.clone()
        places = [(5, 2), (5, 3), (2, 0), (6, 0)]
        batch = PagedBatch.of(
            [Work(1, (0,) * 3, 2, (5, 2), True, Sampling()), Work(2, (0,), 4, (1, 6), True, Sampling())], 4, CPU
        )
        key, value = torch.randn(2, 4, 2, 4)
        backend.write(1, key, value, batch)
        backend.attend(0, torch.randn(4, 4, 4), batch, Scoring(1.0))
        for token, (block, slot) in enumerate(places):
            assert torch.equal(backend.keys(1)[block, slot], key[token])
            assert torch.equal(backend.values(1)[block, slot], value[token])
            for part in backend.layout.parts[1]:
                part.of(before)[block, slot] = part.of(backend.cache)[block, slot]
        assert torch.equal(backend.cache, before)

    def test_both_tiers_have_an_unused_block_0_and_contiguous_blocks_of_all_layers(self, backend: TorchBackend) -> None:
        assert backend.host_cache is not None
        for blocks, cache in ((6, backend.cache), (4, backend.host_cache)):
            assert cache.shape == (blocks + 1, 3 * 2 * prod(backend.part_shape(2, 4)))
            assert cache.dtype == torch.float32
            assert cache[0].is_contiguous()

    def test_the_host_tier_is_optional(self) -> None:
        backend = TorchBackend(CacheGeometry.uniform(3, 2, 4), block_size=4, device_blocks=6)
        assert backend.host_cache is None
        with pytest.raises(AssertionError, match="requires a host tier"):
            backend.swap([Copy(1, 1)], Direction.DEVICE_TO_HOST)


class TestBatchLayout:
    def test_decoding_sequences_share_rows_and_each_prompt_has_its_own(self) -> None:
        work = [
            Work(1, (7,), 4, (2, 5), True, Sampling()),
            Work(2, (8, 9), 0, (3,), False, Sampling()),
            Work(3, (6,), 0, (1,), True, Sampling()),
        ]
        batch = PagedBatch.of(work, 4, CPU)
        assert batch.slots.tolist() == [20, 12, 13, 4]
        decoding, prompt = batch.rows
        assert decoding.tokens.tolist() == [[0], [3]]
        assert decoding.tables.tolist() == [[2, 5], [1, 0]], "padded with the unused block 0"
        assert decoding.ends.tolist() == [5, 1]
        assert (prompt.tokens.tolist(), prompt.tables.tolist(), prompt.ends.tolist()) == ([[1, 2]], [[3]], [2])

    def test_no_work_is_an_empty_batch(self) -> None:
        batch = PagedBatch.of([], 4, CPU)
        assert (batch.slots.tolist(), batch.rows) == ([], ())
