"""The slice of a model that one rank holds."""

from dataclasses import dataclass, replace

from blocks import blocks_for
from engine.attention.cache import CacheGeometry
from engine.attention.llama_shape import LlamaShape


@dataclass(frozen=True)
class Shard:
    """Number `rank` of `size` equal slices."""

    rank: int
    size: int

    def heads(self, count: int) -> slice:
        """Return the slice of attention heads, which `check_ranks` has found to divide."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def each(self, count: int) -> int:
        """Return the number of rows that a rank has, except for the last ones."""
        return blocks_for(count, self.size)

    def part(self, count: int) -> slice:
        """Return the slice of rows that need not divide: the last ranks may have fewer, or none."""
        each = self.each(count)
        return slice(min(count, self.rank * each), min(count, (self.rank + 1) * each))

    def local_shape(self, shape: LlamaShape) -> LlamaShape:
        """Return the shape of this rank's slice of a model: its own heads and its part of the MLP."""
        inner = self.part(shape.intermediate)
        return replace(
            shape,
            heads=shape.heads // self.size,
            kv_heads=shape.kv_heads // self.size,
            intermediate=inner.stop - inner.start,
        )

    def local_geometry(self, geometry: CacheGeometry) -> CacheGeometry:
        """Return the dimensions of this rank's slice of the cache."""
        return geometry.of_rank(self.size)
