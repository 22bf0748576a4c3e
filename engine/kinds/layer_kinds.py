"""Which layers keep their K and V in blocks of one kind: those that see the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from blocks import KIND_0, WindowKind, blocks_for
from engine.attention.cache import CacheGeometry


@dataclass(frozen=True)
class LayerKind:
    """The layers of one kind, by number. They see a window or a chunk of `tokens` tokens, or all tokens if it is 0."""

    layers: tuple[int, ...]
    tokens: int = 0
    chunked: bool = False

    @property
    def name(self) -> str:
        """Name of the kind: `all`, or of a window such as `window-1024`."""
        if not self.tokens:
            return KIND_0
        return f"{'chunk' if self.chunked else 'window'}-{self.tokens}"

    def geometry(self, whole: CacheGeometry) -> CacheGeometry:
        """Return the shapes of its layers."""
        return CacheGeometry(tuple(whole.layers[layer] for layer in self.layers))

    def window(self, device_blocks: int, host_blocks: int, block_bytes: int) -> WindowKind:
        """Describe the kind, which is not that of all tokens, with its numbers of blocks."""
        return WindowKind(
            self.name, self.tokens, device_blocks, host_blocks, self.chunked, len(self.layers), block_bytes
        )


def layer_kinds(geometry: CacheGeometry, context_tokens: int) -> tuple[LayerKind, ...]:
    """Return the kinds of a model's layers: first kind 0, which may have none, then windows by their size.

    A window of the whole context is none.
    """
    found: dict[tuple[int, bool], list[int]] = {(0, False): []}
    for layer, shape in enumerate(geometry.layers):
        seen = shape.window if shape.window < context_tokens else 0
        found.setdefault((seen, shape.chunked and bool(seen)), []).append(layer)
    return tuple(LayerKind(tuple(layers), *of) for of, layers in sorted(found.items()))


def one_kind(geometry: CacheGeometry) -> tuple[LayerKind, ...]:
    """Return the only kind of an engine that keeps all tokens of all layers."""
    return (LayerKind(tuple(range(len(geometry.layers)))),)


def places_of(kinds: Sequence[LayerKind]) -> tuple[tuple[int, int], ...]:
    """Return the kind of each layer, and its index among the layers of that kind."""
    places = {layer: (kind, index) for kind, one in enumerate(kinds) for index, layer in enumerate(one.layers)}
    return tuple(places[layer] for layer in range(len(places)))


def most_blocks(kind: LayerKind, context_tokens: int, step_tokens: int, block_size: int) -> int:
    """Return the most blocks that one sequence holds while its steps compute up to `step_tokens` tokens of it."""
    whole = blocks_for(context_tokens, block_size)
    if not kind.tokens:
        return whole
    return min(whole, kind.window(1, 0, 0).most_blocks(step_tokens, block_size))
