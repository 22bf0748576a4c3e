"""The GPU backend: Triton kernels that read blocks in place and plan their work on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from blocks import Copy
from engine.attention.backend import Direction, PagedBatch, Scoring
from engine.attention.cache import CacheGeometry, LayerShape
from engine.attention.tensor_backend import TensorBackend
from engine.attention.upload import upload
from engine.errors import BackendUnavailable
from engine.triton_kernels.block_copy import copy_blocks, swap_blocks
from engine.triton_kernels.cache_write import write_cache
from engine.triton_kernels.decode import decode
from engine.triton_kernels.paged_layer import PagedLayer
from engine.triton_kernels.prefill import prefill
from engine.triton_kernels.repeated import KernelLaunch
from engine.triton_kernels.rotary_write import HeadNorms, write_rotated
from engine.triton_kernels.scores import ScoreFactors, attention_arguments
from engine.triton_kernels.tuning import MAX_HEAD_SIZE, Tuning, tuning_for
from engine.triton_kernels.work_list import WorkList, list_work, tile_count


@dataclass(frozen=True)
class _Listed:
    """What layers of one batch share: work lists by shape, heads and window, and the launches of equal layers."""

    batch: PagedBatch
    work: dict[tuple[LayerShape, int, int | None], WorkList] = field(default_factory=dict)
    launched: dict[object, list[KernelLaunch]] = field(default_factory=dict)


class TritonBackend(TensorBackend):
    """Paged attention by Triton kernels. Inside a (block, layer), K and V are head-major.

    `attend` serves any batch, which must not change meanwhile, and allocates its buffers at the first layer. So a CUDA
    graph that captures all layers of a new batch rebuilds the work list at each replay. `work_list`, `list_work` and
    `decode` are the separate parts, with buffers of the caller. A batch may have padding rows: sequences of 0 tokens,
    with negative slots.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        block_size: int,
        device_blocks: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | None = None,
        host_blocks: int = 0,
    ) -> None:
        """Allocate the cache (by default on the current GPU), and the host tier if it has blocks."""
        if geometry.largest_head > MAX_HEAD_SIZE:
            raise BackendUnavailable(
                f"its kernels need a head size of at most {MAX_HEAD_SIZE}, not {geometry.largest_head}"
            )
        super().__init__(geometry, block_size, device_blocks, dtype, device or torch.device("cuda"), host_blocks)
        self._tunings: dict[tuple[int, int], Tuning] = {}
        self._listed: _Listed | None = None

    def part_shape(self, kv_heads: int, size: int) -> tuple[int, ...]:
        """Return (KV heads, slots, head size)."""
        return (kv_heads, self.block_size, size)

    def paged_layer(self, number: int) -> PagedLayer:
        """Return a layer in the form of the kernels."""
        return PagedLayer.of(self.cache, self.layout.parts[number])

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch) -> None:
        """Write each token's K and V to its slot; tokens with negative slots are padding."""
        if len(key):
            key, value = self._elements_together(key), self._elements_together(value)
            write_cache(key, value, batch.slots, self.paged_layer(layer), self._common_tuning)

    def write_rotated(
        self,
        layer: int,
        projected: torch.Tensor,
        positions: torch.Tensor,
        rotations: torch.Tensor,
        query: torch.Tensor,
        slots: torch.Tensor,
        norms: HeadNorms | None = None,
    ) -> None:
        """Rotate Q of `projected` into `query`, and write rotated K, and V, to the slots.

        `projected`: `[tokens, (heads + 2 * kv_heads) * head_size]`. `positions`: `[tokens]`. `rotations`: `[positions,
        head_size]`, cosines, then sines. `query`: `[tokens, heads, head_size]`, contiguous. `slots`: `[tokens]` int64.
        With `norms`, each head of Q and K is normalized first. Tokens with negative positions or slots are padding. K
        and V of the layer have the same size.
        """
        if len(query):
            write_rotated(projected, positions, rotations, query, self.paged_layer(layer), slots, norms)

    def attend(self, layer: int, query: torch.Tensor, batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        """Attend with one kernel for decoding sequences and one for prompts, as far as the batch has them."""
        query = self._elements_together(query)
        shape = (*query.shape[:2], self.geometry.layers[layer].value_size)
        output = torch.empty(shape, dtype=query.dtype, device=query.device)
        self.attend_into(layer, query, output, batch, scoring)
        return output

    def attend_into(
        self, layer: int, query: torch.Tensor, output: torch.Tensor, batch: PagedBatch, scoring: Scoring
    ) -> None:
        """Attend into the rows of the batch's tokens; `query` and `output` may have more, which are unchanged.

        `[rows, heads, key_size]` and `[rows, heads, value_size]` in the cache's dtype, `output` contiguous.
        """
        listed, factors = self._listed_for(batch), ScoreFactors.of(scoring)
        shape = self.geometry.layers[layer]
        key = (shape, query.shape[1], query.stride(), factors._replace(sinks=None), factors.sinks is None)
        if key in listed.launched:
            arguments = attention_arguments(query, output, self.paged_layer(layer), factors)
            for one in listed.launched[key]:
                one.again(arguments)
        else:
            listed.launched[key] = self._launch(layer, query, output, batch, factors)

    def work_list(self, layer: int, sequences: int, heads: int, tiles: int = 0) -> WorkList:
        """Allocate a work list for `sequences` sequences of any length and `tiles` tiles of prompts.

        It serves all layers of this one's shape.
        """
        return WorkList.allocate(sequences, tiles, heads, self.paged_layer(layer), self._tuning(layer, heads))

    def list_work(self, layer: int, work: WorkList, batch: PagedBatch, heads: int, window: int | None) -> None:
        """Fill the work list of a batch, once for all layers of this one's shape with the same window.

        Sequences without tokens have no work.
        """
        kv_heads = self.geometry.layers[layer].kv_heads
        list_work(work, batch, kv_heads, heads // kv_heads, window, self._tuning(layer, heads))

    def decode(
        self,
        layer: int,
        query: torch.Tensor,
        output: torch.Tensor,
        batch: PagedBatch,
        scoring: Scoring,
        work: WorkList,
    ) -> None:
        """Attend for sequences that feed one token, into their rows of `output`; other rows are unchanged.

        The work must have been listed for this batch and window, and a layer of this shape.
        """
        self._decode(layer, query, output, batch, work, ScoreFactors.of(scoring))

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy all pairs in one launch."""
        if copies:
            copy_blocks(self.cache, self._pairs(copies), self._common_tuning)

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Copy all pairs in one launch, whose kernel reads or writes the pinned memory of the host."""
        assert self.host_cache is not None, "swap requires a host tier"
        to_host = direction is Direction.DEVICE_TO_HOST
        source, target = (self.cache, self.host_cache) if to_host else (self.host_cache, self.cache)
        if copies:
            swap_blocks(source, target, self._pairs(copies), self._common_tuning)

    def _pairs(self, copies: Sequence[Copy]) -> torch.Tensor:
        # Allocated on the current stream, as is the launch that reads it, so that it may be dropped after the launch.
        return upload(np.array(copies, dtype=np.int64), torch.int64, self.cache.device)

    def resize(self, device_blocks: int) -> None:
        """Replace the cache by one of another size, without its contents. Recorded steps must not use the old one."""
        self._listed = None  # its launches keep the cache
        super().resize(device_blocks)

    def use(self, cache: torch.Tensor, host_cache: torch.Tensor | None) -> None:
        """Use other tensors of the same shapes and types from now on. Recorded steps must not use the old ones."""
        self._listed = None
        super().use(cache, host_cache)

    def _launch(
        self, layer: int, query: torch.Tensor, output: torch.Tensor, batch: PagedBatch, factors: ScoreFactors
    ) -> list[KernelLaunch]:
        heads, launched = query.shape[1], []
        work = self._work_of(layer, batch, heads, factors.window or None)
        if 1 in batch.fed:
            launched += self._decode(layer, query, output, batch, work, factors)
        if len(work.tiles):
            tuning = self._tuning(layer, heads)
            launched += prefill(query, output, self.paged_layer(layer), batch, work, factors, tuning)
        return launched

    def _decode(
        self,
        layer: int,
        query: torch.Tensor,
        output: torch.Tensor,
        batch: PagedBatch,
        work: WorkList,
        factors: ScoreFactors,
    ) -> list[KernelLaunch]:
        return decode(query, output, self.paged_layer(layer), batch, work, factors, self._tuning(layer, query.shape[1]))

    def _listed_for(self, batch: PagedBatch) -> "_Listed":
        if self._listed is None or self._listed.batch is not batch:
            self._listed = _Listed(batch)
        return self._listed

    def _work_of(self, layer: int, batch: PagedBatch, heads: int, window: int | None) -> WorkList:
        """Return the work list of a batch, filled by the first of the layers with this one's shape and window."""
        lists = self._listed_for(batch).work
        shape = self.geometry.layers[layer]
        if (shape, heads, window) not in lists:
            tiles = tile_count(batch, heads // shape.kv_heads, self._tuning(layer, heads))
            work = self.work_list(layer, len(batch.fed), heads, tiles)
            self.list_work(layer, work, batch, heads, window)
            lists[shape, heads, window] = work
        return lists[shape, heads, window]

    def _tuning(self, layer: int, heads: int) -> Tuning:
        shape = self.geometry.layers[layer]
        return self._tuning_of(heads // shape.kv_heads, max(shape.key_size, shape.value_size))

    @property
    def _common_tuning(self) -> Tuning:
        """The tuning of what does not depend on the shapes of layers and queries."""
        return self._tuning_of(1, self.geometry.largest_head)

    def _tuning_of(self, group: int, size: int) -> Tuning:
        if (group, size) not in self._tunings:
            self._tunings[group, size] = tuning_for(size, self.cache.dtype, group, self.cache.device)
        return self._tunings[group, size]

    def _elements_together(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it in the cache's type, with each head's elements side by side."""
        tensor = tensor.to(self.cache.dtype)
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
