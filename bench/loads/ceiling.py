"""The least time in which a machine can run a Llama-shaped model: what it must read and multiply.

In bfloat16, or with packed weights: their bytes, and their products with rows of 8-bit integers.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, inf
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from engine.attention.llama_shape import LlamaShape
from engine.native.formats.gguf.header import read_header
from engine.native.kernels import Kernels

MIB = 1 << 20
READS = 12
ROUNDS = 1 << 19  # of products, some milliseconds
_BYTES = 2  # of an element


class MachineLimits(NamedTuple):
    """Bytes read, and operations of products (multiplications and additions), a second."""

    bandwidth: float
    operations: float
    int8_operations: float = inf

    def seconds(self, read: float, operations: float, int8_operations: float = 0.0) -> float:
        """Return the least time of a step, which may read and multiply at the same time."""
        products = operations / self.operations + int8_operations / self.int8_operations
        return max(read / self.bandwidth, products)


class ModelSizes(NamedTuple):
    """The sizes of a Llama-shaped model, named as in LlamaShape."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, folder: Path) -> "ModelSizes":
        """Read the sizes from the configuration in a model's folder."""
        config = json.loads((folder / "config.json").read_text())
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_size=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
        )


class PackedBytes(NamedTuple):
    """Bytes of packed matrices: of all layers, and of the head."""

    layers: int
    head: int

    @classmethod
    def of(cls, gguf: Path) -> "PackedBytes":
        """Return those of a GGUF file; without a head of its own, the embedding is the head."""
        places = read_header(gguf).tensors
        layers = sum(one.size for name, one in places.items() if name.startswith("blk.") and len(one.shape) > 1)
        return cls(layers, places.get("output.weight", places["token_embd.weight"]).size)


class ModelCosts(NamedTuple):
    """What a model reads and multiplies.

    An element of a matrix is one multiplication and one addition for each row, that is an operation for each byte in
    bfloat16. Products with packed matrices are of 8-bit integers; those of attention are not.
    """

    layers: int
    """Operations of the layers' matrices for each row."""
    head: int
    """Operations of the head's matrix for each row."""
    key: int
    """Bytes of K and V of one token."""
    pair: int
    """Operations of attention for one query and one key, over all heads and layers."""
    last: int = 0
    """Operations of the last layer's matrices for each row that has logits: others have only K and V there."""
    last_pair: int = 0
    """The same of attention, for one query of such a row and one key."""
    packed: PackedBytes | None = None
    """None in bfloat16."""

    @classmethod
    def of(cls, shape: LlamaShape | ModelSizes) -> "ModelCosts":
        """Return the costs of a model of this shape."""
        queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        beside = shape.hidden * (2 * queries + 3 * shape.intermediate)  # beside K and V
        return cls(
            layers=_BYTES * shape.layers * (beside + shape.hidden * 2 * keys),
            head=_BYTES * shape.vocabulary * shape.hidden,
            key=_BYTES * shape.layers * 2 * keys,
            pair=2 * shape.layers * 2 * queries,
            last=_BYTES * beside,
            last_pair=2 * 2 * queries,
        )

    @property
    def elements(self) -> PackedBytes:
        """Elements of the matrices: their bytes in 8 bits, without scales."""
        return PackedBytes(self.layers // _BYTES, self.head // _BYTES)

    @property
    def matrices(self) -> int:
        """Bytes of all matrices."""
        return sum(self._read)

    @property
    def _read(self) -> PackedBytes:
        return self.packed or PackedBytes(self.layers, self.head)

    def least_seconds(self, lengths: Sequence[int], tokens: int, token_budget: int, limits: MachineLimits) -> float:
        """Return the least time for prompts of these lengths, and `tokens` of output each, begun together."""
        return self._prompts(lengths, token_budget, limits) + sum(
            self._step([length + generated for length in lengths], limits) for generated in range(1, tokens)
        )

    def _prompts(self, lengths: Sequence[int], token_budget: int, limits: MachineLimits) -> float:
        rows, pairs = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
        read = ceil(rows / token_budget) * self._read.layers + self._read.head
        products = rows * self.layers + len(lengths) * self.head - (rows - len(lengths)) * self.last
        attention = pairs * self.pair - (pairs - rows) * self.last_pair  # a prompt's last row has a pair for each row
        return self._seconds(read, products, attention, limits)

    def _step(self, contexts: Sequence[int], limits: MachineLimits) -> float:
        read = self.matrices + sum(contexts) * self.key
        return self._seconds(read, len(contexts) * (self.layers + self.head), sum(contexts) * self.pair, limits)

    def _seconds(self, read: int, products: int, attention: int, limits: MachineLimits) -> float:
        if self.packed:
            return limits.seconds(read, attention, products)
        return limits.seconds(read, products + attention)


def measurement(kernels: Kernels, read_bytes: int) -> Callable[[], MachineLimits]:
    """Return a measurement of the machine's limits, with as many threads as the engine has.

    Reads are of `read_bytes`, as many as a step of the model reads again and again, in whole MiB: so the same share of
    them is in the CPU's caches. The memory has pages like those of weights and cache. The fastest of several
    measurements counts.
    """
    memory = kernels.zeros((max(read_bytes // MIB, 1) * MIB,), torch.uint8).fill_(1)
    threads = torch.get_num_threads()

    def rate(amount: Callable[[], int]) -> float:
        begun = perf_counter()
        return amount() / (perf_counter() - begun)

    def read() -> int:
        kernels.read(memory, threads)
        return memory.nbytes

    def measure() -> MachineLimits:
        operations, int8_operations = (
            max(rate(partial(multiply, ROUNDS, threads)) for _ in range(READS))
            for multiply in (kernels.multiply, kernels.multiply_int8)
        )
        return MachineLimits(max(rate(read) for _ in range(READS)), operations, int8_operations)

    return measure
