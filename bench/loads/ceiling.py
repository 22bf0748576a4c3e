"""The least time in which a machine can run a Llama-shaped model in bfloat16: what it must read and multiply."""

from collections.abc import Callable, Sequence
from math import ceil
from time import perf_counter
from typing import NamedTuple

import torch

from engine.attention.llama_shape import LlamaShape
from engine.native.kernels import Kernels

READ_MIB = 512
READS = 5
ROUNDS = 1 << 19  # of products, some milliseconds
_BYTES = 2  # of an element


class MachineLimits(NamedTuple):
    """Bytes read, and operations of products (multiplications and additions), a second."""

    bandwidth: float
    operations: float

    def seconds(self, read: float, operations: float) -> float:
        """Return the least time of a step, which may read and multiply at the same time."""
        return max(read / self.bandwidth, operations / self.operations)


class ModelCosts(NamedTuple):
    """What a model reads and multiplies.

    An element of a matrix is one multiplication and one addition for each row, that is an operation for each byte.
    """

    layers: int
    """Bytes of the layers' matrices."""
    head: int
    """Bytes of the head's matrix."""
    key: int
    """Bytes of K and V of one token."""
    pair: int
    """Operations of attention for one query and one key, over all heads and layers."""

    @classmethod
    def of(cls, shape: LlamaShape) -> "ModelCosts":
        """Return the costs of a model of this shape."""
        queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        elements = shape.hidden * (2 * queries + 2 * keys + 3 * shape.intermediate)
        return cls(
            layers=_BYTES * shape.layers * elements,
            head=_BYTES * shape.vocabulary * shape.hidden,
            key=_BYTES * shape.layers * 2 * keys,
            pair=2 * shape.layers * 2 * queries,
        )

    @property
    def matrices(self) -> int:
        """Bytes of all matrices."""
        return self.layers + self.head

    def least_seconds(self, lengths: Sequence[int], tokens: int, token_budget: int, limits: MachineLimits) -> float:
        """Return the least time for prompts of these lengths, and `tokens` of output each, begun together."""
        return self._prompts(lengths, token_budget, limits) + sum(
            self._step([length + generated for length in lengths], limits) for generated in range(1, tokens)
        )

    def _prompts(self, lengths: Sequence[int], token_budget: int, limits: MachineLimits) -> float:
        steps, pairs = ceil(sum(lengths) / token_budget), sum(length * (length + 1) // 2 for length in lengths)
        operations = sum(lengths) * self.layers + len(lengths) * self.head + pairs * self.pair
        return limits.seconds(steps * self.layers + self.head, operations)

    def _step(self, contexts: Sequence[int], limits: MachineLimits) -> float:
        read = self.matrices + sum(contexts) * self.key
        return limits.seconds(read, len(contexts) * self.matrices + sum(contexts) * self.pair)


def measurement(kernels: Kernels) -> Callable[[], MachineLimits]:
    """Return a measurement of the machine's limits, with as many threads as the engine has.

    The memory has pages like those of weights and cache. The fastest of several measurements counts.
    """
    memory = kernels.zeros((READ_MIB << 20,), torch.uint8).fill_(1)
    threads = torch.get_num_threads()

    def rate(amount: Callable[[], int]) -> float:
        begun = perf_counter()
        return amount() / (perf_counter() - begun)

    def read() -> int:
        kernels.read(memory, threads)
        return memory.nbytes

    def measure() -> MachineLimits:
        operations = max(rate(lambda: kernels.multiply(ROUNDS, threads)) for _ in range(READS))
        return MachineLimits(max(rate(read) for _ in range(READS)), operations)

    return measure
