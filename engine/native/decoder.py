"""A Llama-shaped model run entirely by the kernels: one call for a step, instead of hundreds of modules.

Its layers may have mixtures of experts, whose weights are packed side by side.

Activations are float32, K and V bfloat16. Weights are bfloat16, or quantized as their files hold them; activations that
quantized weights multiply are quantized to 8 bits.
"""

from collections.abc import Iterator, Sequence
from ctypes import POINTER, cast
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from engine.attention.backend import PagedBatch
from engine.attention.llama_shape import ExpertsShape, LlamaShape, head_size, is_llama_shaped, is_mixture
from engine.attention.upload import IntegerType
from engine.errors import ModelUnsupported
from engine.native.formats.grouped import GroupedWeights
from engine.native.grouped_strips import OUTPUTS, pack_strips, strips_size
from engine.native.kernels import (
    MAX_HEAD_SIZE,
    Kernels,
    LayerCaches,
    NativeExperts,
    NativeLayer,
    NativeMatrix,
    NativeModel,
    packed_size,
)
from engine.native.llama_weights import EMBEDDING, HEAD, FileWeights, LlamaWeights

_ROOM = 64 << 20  # bytes allocated at once for packed weights
_COLUMNS = 16  # columns of gate and gated product that alternate
_INPUTS = 32  # to whose multiples the kernels pad inputs


def runs(model: Any) -> bool:
    """Return whether NativeDecoder supports a model."""
    if not (is_llama_shaped(model) or is_mixture(model)):
        return False
    size = head_size(model.config)
    return all(one % _COLUMNS == 0 for one in (size, *_inner_sizes(model))) and size <= MAX_HEAD_SIZE


def _inner_sizes(model: Any) -> Iterator[int]:
    """Yield the elements of a gated product, of layers with and without experts."""
    experts = ExpertsShape.of(model)
    if experts is None or not all(experts.layers):
        yield model.config.intermediate_size
    if experts is not None:
        yield experts.intermediate


class NativeDecoder:
    """Runs the steps of one model over one cache."""

    integers: IntegerType = np.int32

    def __init__(
        self,
        kernels: Kernels,
        shape: LlamaShape,
        weights: LlamaWeights,
        caches: LayerCaches,
        context_tokens: int,
        threads: int,
    ) -> None:
        """Pack the weights of a Llama-shaped model. `caches` are those of its layers.

        Positions are below `context_tokens`.

        Raises ModelUnsupported if a tensor is missing.
        """
        self._kernels = kernels
        self.from_files = isinstance(weights, FileWeights)
        self._weights: LlamaWeights | None = weights  # until they are packed
        self._caches = caches
        self._threads = threads
        self._kept: list[torch.Tensor] = []  # tensors that the structures point to
        self._strip_arrays: list[npt.NDArray[np.void]] = []  # the same
        self._room = torch.empty(0, dtype=torch.uint8)  # for the next packed weights
        self._model = self._native_model(shape, context_tokens)
        self._weights = None

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Return `[places, vocabulary]` logits of a flattened batch, at these indices."""
        tokens = tuple(one if one.dtype == torch.int32 else one.int() for one in (token_ids, positions, places))
        return self._kernels.step(self._model, self._caches, batch, tokens, self._threads)

    def _native_model(self, shape: LlamaShape, context_tokens: int) -> NativeModel:
        described = NativeModel(
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            intermediate=shape.intermediate,
            vocabulary=shape.vocabulary,
            epsilon=shape.epsilon,
            scaling=shape.scaling,
            experts=_native_experts(shape.experts),
        )
        self._layers = (NativeLayer * shape.layers)(*(self._layer(number, shape) for number in range(shape.layers)))
        described.layer = cast(self._layers, POINTER(NativeLayer))
        described.embedding = self._matrix(EMBEDDING)
        described.head = described.embedding if self._tied() else self._matrix(HEAD)
        described.final_norm = self._float(self._tensor("model.norm.weight"))
        described.cosine, described.sine = map(self._float, shape.rotations(context_tokens))
        return described

    def _layer(self, number: int, shape: LlamaShape) -> NativeLayer:
        layer, attention = f"model.layers.{number}", f"model.layers.{number}.self_attn"
        projections = [f"{attention}.{name}_proj" for name in "qkv"]
        described = NativeLayer(window=shape.windows[number])
        described.projections = self._matrix(*(f"{one}.weight" for one in projections))
        described.output = self._matrix(f"{attention}.o_proj.weight")
        if shape.experts and shape.experts.layers[number]:
            self._mixture(described, f"{layer}.mlp", shape.experts)
        else:
            described.gates, described.down = self._mlp(*_mlp_names(f"{layer}.mlp"))
        described.attention_norm = self._float(self._tensor(f"{layer}.input_layernorm.weight"))
        described.mlp_norm = self._float(self._tensor(f"{layer}.post_attention_layernorm.weight"))
        if self._optional(f"{projections[0]}.bias") is not None:
            described.projection_bias = self._float(torch.cat([self._tensor(f"{one}.bias") for one in projections]))
        if (norm := self._optional(f"{attention}.q_norm.weight")) is not None:
            described.query_norm = self._float(norm)
            described.key_norm = self._float(self._tensor(f"{attention}.k_norm.weight"))
        described.output_bias = self._optional_float(f"{attention}.o_proj.bias")
        described.sinks = self._optional_float(f"{attention}.sinks")
        return described

    def _mixture(self, described: NativeLayer, mlp: str, shape: ExpertsShape) -> None:
        """Describe a layer's router and experts. GPT-OSS has biases, in which gate and up alternate."""
        router = self._optional(f"{mlp}.gate.weight")
        described.router = self._float(_router(self._tensor(f"{mlp}.router.weight") if router is None else router))
        described.router_bias = self._optional_float(f"{mlp}.router.bias")
        described.gates, described.down = self._experts(
            [_mlp_names(f"{mlp}.experts.{one}") for one in range(shape.count)]
        )
        if (bias := self._optional(f"{mlp}.experts.gate_up_proj_bias")) is not None:
            gates = [_alternating(one[::2, None], one[1::2, None]) for one in bias]
            described.gates_bias = self._float(torch.cat(gates))
            down = self._tensor(f"{mlp}.experts.down_proj_bias")
            described.down_bias = self._float(pad(down, (0, -down.shape[1] % OUTPUTS)))

    def _experts(self, names: Sequence[Sequence[str]]) -> tuple[NativeMatrix, NativeMatrix]:
        """Pack gates, ups and downs of experts as `_mlp` does, those of one expert after those of another."""
        assert self._weights is not None
        if self._weights.grouped(names[0][0]) is not None:
            pieces = [[self._pack_grouped(self._quantized(name)) for name in three] for three in names]
            gates = np.concatenate([np.stack(three[:2], axis=1).reshape(-1) for three in pieces])
            return self._strips(gates), self._strips(np.concatenate([three[2] for three in pieces]))
        gates_and_ups = (_alternating(self._tensor(gate), self._tensor(up)) for gate, up, _ in names)
        dense = self._pack_all(gates_and_ups, len(names))
        return dense, self._pack_all((self._tensor(down) for _, _, down in names), len(names))

    def _quantized(self, name: str) -> GroupedWeights:
        assert self._weights is not None
        found = self._weights.grouped(name)
        if found is None:
            raise ModelUnsupported(f"its tensor {name} is not quantized, but those of other experts are")
        return found

    def _optional_float(self, name: str) -> int | None:
        found = self._optional(name)
        return None if found is None else self._float(found)

    def _optional(self, name: str) -> torch.Tensor | None:
        assert self._weights is not None
        return self._weights.tensor(name)

    def _tensor(self, name: str) -> torch.Tensor:
        found = self._optional(name)
        if found is None:
            raise ModelUnsupported(f"its weights have no tensor {name}")
        return found

    def _tied(self) -> bool:
        assert self._weights is not None
        return self._weights.tied()

    def _grouped(self, names: Sequence[str]) -> list[GroupedWeights] | None:
        """Return quantized matrices, None unless all of them are quantized."""
        assert self._weights is not None
        found = [one for name in names if (one := self._weights.grouped(name)) is not None]
        return found if len(found) == len(names) else None

    def _matrix(self, *names: str) -> NativeMatrix:
        """Pack matrices, whose outputs follow each other."""
        if grouped := self._grouped(names):
            return self._strips(np.concatenate([self._pack_grouped(one) for one in grouped]))
        tensors = [self._tensor(name) for name in names]
        return NativeMatrix(dense=self._pack(torch.cat(tensors) if len(tensors) > 1 else tensors[0]))

    def _mlp(self, gate: str, up: str, down: str) -> tuple[NativeMatrix, NativeMatrix]:
        """Pack gate and gated product, 16 outputs of each alternating, and the matrix after them.

        The kernels expect all of them quantized, or none.
        """
        if grouped := self._grouped((gate, up, down)):
            pieces = [self._pack_grouped(one) for one in grouped]
            return self._strips(np.stack(pieces[:2], axis=1).reshape(-1)), self._strips(pieces[2])
        gates = self._pack(_alternating(self._tensor(gate), self._tensor(up)))
        return NativeMatrix(dense=gates), NativeMatrix(dense=self._pack(self._tensor(down)))

    def _pack(self, weights: torch.Tensor) -> int:
        packed = self._take(packed_size(weights) * 2).view(torch.bfloat16)
        self._kernels.pack(weights, packed)
        return packed.data_ptr()

    def _pack_all(self, matrices: Iterator[torch.Tensor], count: int) -> NativeMatrix:
        """Pack matrices of the same size side by side."""
        first = next(matrices)
        size = packed_size(first)
        packed = self._take(count * size * 2).view(torch.bfloat16)
        for place, one in enumerate(chain([first], matrices)):
            self._kernels.pack(one, packed[place * size :])
        return NativeMatrix(dense=packed.data_ptr())

    def _pack_grouped(self, weights: GroupedWeights) -> npt.NDArray[np.void]:
        packed = self._take(strips_size(self._kernels, weights))
        return pack_strips(self._kernels, weights, packed, self._threads)

    def _strips(self, strips: npt.NDArray[np.void]) -> NativeMatrix:
        self._strip_arrays.append(strips)
        return NativeMatrix(strips=strips.ctypes.data, count=len(strips))

    def _take(self, count: int) -> torch.Tensor:
        """Return memory for packed weights."""
        if count > len(self._room):  # matrices share large pages, because most would not fill one
            self._room = self._kernels.zeros([max(count, _ROOM)], torch.uint8)
        packed, self._room = self._room[:count], self._room[count:]
        self._kept.append(packed)
        return packed

    def _float(self, values: torch.Tensor) -> int:
        return self._keep(values.detach().float().contiguous())

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _alternating(gate: torch.Tensor, gated: torch.Tensor) -> torch.Tensor:
    """Return 16 rows of `gate`, 16 of `gated`, and so on."""
    rows, inputs = gate.shape
    pieces = [weights.view(rows // _COLUMNS, _COLUMNS, inputs) for weights in (gate, gated)]
    return torch.stack(pieces, dim=1).view(2 * rows, inputs)


def _mlp_names(mlp: str) -> list[str]:
    return [f"{mlp}.{name}_proj.weight" for name in ("gate", "up", "down")]


def _native_experts(shape: ExpertsShape | None) -> NativeExperts:
    if shape is None:
        return NativeExperts()
    return NativeExperts(shape.count, shape.chosen, shape.intermediate, shape.of_all, shape.limit, shape.alpha)


def _router(weights: torch.Tensor) -> torch.Tensor:
    """Return `[experts, inputs]` weights as float32 `[experts / 16, inputs, 16]`, padded with zeros."""
    experts, inputs = weights.shape
    padded = pad(weights.float(), (0, -inputs % _INPUTS, 0, -experts % OUTPUTS))
    return padded.view(-1, OUTPUTS, padded.shape[1]).transpose(1, 2)
