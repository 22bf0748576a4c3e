"""The CPU backend: kernels that read blocks in place, and K and V once for all query heads that share them."""

from collections.abc import Sequence

import torch

from blocks import Copy
from engine.attention.backend import Direction, PagedBatch, Scoring
from engine.attention.cache import CacheGeometry, CacheLayout, head_elements, make_host_cache
from engine.errors import ModelUnsupported
from engine.native.kernels import LEAST_CHECKED, MAX_HEAD_SIZE, CacheView, Kernels, LayerCaches, layer_caches


class CpuBackend:
    """Paged attention by native kernels. Inside a (block, layer), K and V have the layout of x86/kernels.cpp."""

    def __init__(
        self,
        kernels: Kernels,
        geometry: CacheGeometry,
        block_size: int,
        device_blocks: int,
        dtype: torch.dtype = torch.float32,
        host_blocks: int = 0,
        threads: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the cache, and the host tier if it has blocks. 0 threads means as many as torch uses.

        `dtype` is the model's type, and that of the cache unless `kv_dtype` is int8.

        Raises ModelUnsupported if heads are larger than the kernels support.
        """
        if geometry.largest_head > MAX_HEAD_SIZE:
            raise ModelUnsupported(
                f"its head size must be at most {MAX_HEAD_SIZE} for the CPU kernels, not {geometry.largest_head}"
            )
        self.geometry = geometry
        self.block_size = block_size
        self._kernels = kernels
        self._threads = threads or torch.get_num_threads()
        device = torch.device("cpu")
        self._stored = kv_dtype or dtype
        self.layout = CacheLayout.of(geometry, self.part_shape)
        self.cache = kernels.zeros(self.layout.shape(device_blocks), self._stored)
        self.host_cache = make_host_cache(self.layout, host_blocks, self._stored, device)
        # The kernels multiply codes as bfloat16 or float32.
        multiplied = torch.float32 if self._stored == torch.int8 and dtype == torch.float16 else dtype
        self.view = CacheView.of(self.cache, geometry, self.layout, block_size, multiplied)

    @property
    def layer_caches(self) -> LayerCaches:
        """The caches of its layers for `NativeDecoder`."""
        return layer_caches([self.view], [(0, layer) for layer in range(len(self.geometry.layers))])

    def use(self, cache: torch.Tensor, host_cache: torch.Tensor | None) -> None:
        """Use other tensors of the same shapes and types from now on, also in decoders that have the view."""
        self.cache, self.host_cache = cache, host_cache
        self.view = self.view.at(cache)

    def part_shape(self, kv_heads: int, size: int) -> tuple[int, ...]:
        """Return (KV heads, elements of one head's slots, or bytes of their codes and scales)."""
        return (kv_heads, head_elements(size, self.block_size, self._stored))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch) -> None:
        """Write each token's K and V to its slot."""
        key, value = key.to(self.view.dtype).contiguous(), value.to(self.view.dtype).contiguous()
        self._kernels.write(self.view, layer, key, value, batch.slots)

    def attend(self, layer: int, query: torch.Tensor, batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        """Attend with all sequences of the batch at once."""
        converted = query.to(self.view.dtype).contiguous()
        return self._kernels.attend(self.view, layer, converted, batch, scoring, self._threads).to(query.dtype)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy each block as one range of bytes, on all threads."""
        self._kernels.copy_blocks(self.cache, self.cache, copies, self._threads)

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Copy each block as one range of bytes to the other tier, on all threads."""
        self._kernels.copy_blocks(*self._tiers(direction), copies, self._threads)

    def swap_checked(self, copies: Sequence[Copy], direction: Direction) -> list[int]:
        """Copy as `swap` does, and return the checksums of the bytes, which are read once, if it `checks_copies`."""
        return self._kernels.copy_checked(*self._tiers(direction), copies, self._threads)

    @property
    def checks_copies(self) -> bool:
        """Whether blocks are large enough for `swap_checked`."""
        return self.cache[0].nbytes >= LEAST_CHECKED

    def _tiers(self, direction: Direction) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.host_cache is not None, "swap requires a host tier"
        tiers = self.cache, self.host_cache
        return tiers if direction is Direction.DEVICE_TO_HOST else tiers[::-1]
