"""Sizes: how many blocks fit into memory, and how many requests fit into blocks.

Used by the engine to size its pool, and by `quire plan` to predict it.
"""

from dataclasses import dataclass
from math import gcd

from blocks import blocks_for, counted
from engine.attention.cache import CacheGeometry
from engine.errors import ModelUnsupported

# Of a GPU's memory, kept free for the launches of recorded steps whatever the utilization, beside their inputs and
# logits (RecordedSizes). Not measured on a GPU. It holds their activations too: all sizes of Llama-3-8B with 256
# sequences have 46 MB in common, with 1,024 they have 184 MB; recorded prompts of up to 256 tokens add 10 MB.
RECORDED_SHARE = 0.02
# Of several ranks, besides the output: a rank's part of the logits; those of all ranks; and with the modules of
# transformers these side by side.
_GATHERED_LOGITS = 3
# Of a sequence in a recorded step: token, position, slot, place of its logits (8 each), end and first token (4 each).
_INPUT_BYTES = 40
_TABLE_ENTRY_BYTES = 4
# Per token of the vocabulary and sampled row: logits, their float32 copies, order, probabilities and noise with torch's
# operators; less with the kernels of CPUs. On a GPU: logits (4), candidates of filters (8), token counts (2, allocated
# once), and copies of rows that rules change.
_SAMPLING_BYTES = 48


class DoesNotFit(Exception):
    """A pool does not fit; the message says why."""


def blocks_on_gpu(memory_bytes: int, utilization: float, used_bytes: int, free_bytes: int, block_bytes: int) -> int:
    """Return the blocks that fit on a GPU beside weights and a step, which have `used_bytes`. Raises DoesNotFit.

    They take at most this share of the memory together, and at most the free memory less RECORDED_SHARE: the rest holds
    the launches of recorded steps, the GPU's context, libraries and gaps. What recorded steps keep besides launches
    (RecordedSizes) is not free.
    """
    shared = int(memory_bytes * utilization) - used_bytes
    room = min(shared, free_bytes - int(memory_bytes * RECORDED_SHARE))
    blocks = blocks_within(max(0, room), block_bytes)
    if blocks:
        return blocks
    needed = _gib(used_bytes + cache_bytes(1, block_bytes))
    if room < shared:
        beside = "weights, a step and recorded steps"
        raise DoesNotFit(f"{_gib(max(0, free_bytes))} of it are free beside {beside}, too few for a pool of a block")
    usable = _gib(int(memory_bytes * utilization))
    raise DoesNotFit(f"{usable} of it can be used, but a pool of one block needs {needed}")


def blocks_within(memory_bytes: int, block_bytes: int) -> int:
    """Return the number of usable blocks of a cache of at most `memory_bytes`, 0 if none fits.

    Block 0, which is never allocated, takes memory and is not counted.
    """
    return max(0, memory_bytes // block_bytes - 1)


def cache_bytes(blocks: int, block_bytes: int) -> int:
    """Return the bytes of a cache of `blocks` usable blocks, block 0 included; 0 for no blocks."""
    return (blocks + 1) * block_bytes if blocks else 0


@dataclass(frozen=True)
class StepSizes:
    """The numbers that determine the memory of one step: limits, and a model's widths in elements.

    `inner_size` is the intermediate size of the MLP for one token, summed over its experts.
    """

    token_budget: int
    max_sequences: int
    hidden_size: int
    inner_size: int
    vocabulary_size: int

    def bytes(self, element_bytes: int) -> int:
        """Return an upper bound of a step's memory besides weights and cache: activations and sampling.

        Scores of whole prompts (prompt log-probabilities) and the gathers of the backend `torch` are not included.
        """
        activations = self.token_budget * (8 * self.hidden_size + 4 * self.inner_size) * element_bytes
        return activations + self.max_sequences * self.vocabulary_size * _SAMPLING_BYTES


@dataclass(frozen=True)
class RecordedSizes:
    """The numbers that determine what recorded decoding steps keep: the largest batch, and the blocks of a sequence.

    Logits have elements of `element_bytes`; several `ranks` gather theirs.
    """

    sequences: int
    blocks: int
    vocabulary_size: int
    element_bytes: int
    ranks: int = 1

    @property
    def kept(self) -> int:
        """Bytes of inputs and logits. They are allocated once, for the largest batch; smaller batches use a part."""
        tables = self.sequences * self.blocks * _TABLE_ENTRY_BYTES
        return self._logits + self.sequences * _INPUT_BYTES + tables + _TABLE_ENTRY_BYTES

    @property
    def reserved(self) -> int:
        """Bytes of these, and of what the largest batch needs to compute its logits before they are in their place.

        That is a copy of them unless the decoder writes them there itself.
        """
        return self.kept + self._logits * (_GATHERED_LOGITS if self.ranks > 1 else 1)

    @property
    def _logits(self) -> int:
        return self.sequences * self.vocabulary_size * self.element_bytes


@dataclass(frozen=True)
class PoolSize:
    """A pool of blocks, and the number of requests it holds at the same time without sharing."""

    block_size: int
    blocks: int

    @property
    def tokens(self) -> int:
        """Number of slots."""
        return self.blocks * self.block_size

    def blocks_of(self, tokens: int) -> int:
        """Return the blocks of a request of `tokens` tokens in all; its last token is never fed."""
        return blocks_for(max(1, tokens - 1), self.block_size)

    def requests(self, tokens: int) -> int:
        """Return the number of requests of `tokens` tokens that fit with paging."""
        return self.blocks // self.blocks_of(tokens)

    def reserved_requests(self, context_tokens: int) -> int:
        """Return the number of requests that fit if each reserves its maximum length contiguously, without paging."""
        return self.tokens // context_tokens

    def last_block_waste(self) -> float:
        """Return the mean number of empty slots in a sequence's last block, for uniformly distributed lengths."""
        return (self.block_size - 1) / 2


def check_ranks(size: int, heads: int, geometry: CacheGeometry) -> None:
    """Raise ModelUnsupported unless `size` ranks can divide the heads of all layers; it names the sizes that can."""
    kv_heads = sorted({one.kv_heads for one in geometry.layers})
    common = gcd(heads, *kv_heads)
    if common % size == 0:
        return
    sizes = [number for number in range(1, common + 1) if common % number == 0]
    of_layers = " or ".join(map(str, kv_heads[:-1])) + " or " if len(kv_heads) > 1 else ""
    raise ModelUnsupported(
        f"tensor_parallel is {size}, which does not divide its {counted(heads, 'attention head')} and "
        f"{of_layers}{counted(kv_heads[-1], 'KV head')}: possible are {', '.join(map(str, sizes))}"
    )


def _gib(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB"
