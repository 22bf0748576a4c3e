"""The CPU's attention kernels, compared with memory bandwidth and with torch on contiguous and gathered memory.

Decoding: 32 sequences of 1,024 tokens with the heads of the demo model, in bfloat16. Each measurement covers all
layers, so that no CPU cache holds data of the next one. Prompts: the last 2,048 tokens of prompts of 8,192 to 100,000
tokens, one layer. All kernels take turns, Quire's twice.

The floor is the fastest of all reads of the same memory, in the same pages: a limit.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from blocks import blocks_for
from engine.attention import PagedBatch, TorchBackend
from engine.attention.backend import Scoring
from engine.attention.cache import CacheGeometry
from engine.model.loaded import dtype_name
from engine.native.cpu_backend import CpuBackend
from engine.native.kernels import Kernels
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from services.engine.startup.native_kernels import load_kernels
from services.models.model_store import default_cache

REPETITIONS = 12
SEQUENCES, CONTEXT, BLOCK_SIZE, GROUP = 32, 1024, 16, 3
LAYERS, KV_HEADS, HEAD_SIZE = 30, 3, 64
GEOMETRY = CacheGeometry.uniform(LAYERS, KV_HEADS, HEAD_SIZE)
PROMPTS = (8_192, 32_768, 100_000)
CHUNK = 2_048
PROMPT_REPETITIONS = 5
BLOCKS = SEQUENCES * CONTEXT // BLOCK_SIZE
SCORING = Scoring(HEAD_SIZE**-0.5)
DTYPE = torch.bfloat16
CPU = torch.device("cpu")
CODE = ("engine/attention", "engine/native", "bench/engine/kernels.py")

_DECODING = f"{SEQUENCES} sequences of {CONTEXT} tokens"

Ways = dict[str, Callable[[], object]]
Seconds = dict[str, list[float]]


def main() -> None:
    """Measure everything, and publish it."""
    kernels = load_kernels(str(default_cache().parent / "kernels"))
    query = torch.randn(SEQUENCES, KV_HEADS * GROUP, HEAD_SIZE, dtype=DTYPE)
    ways = _ways(kernels, query)
    seconds = take_turns(ways, repeated(REPETITIONS, "kernels"))
    kv_bytes = LAYERS * 2 * SEQUENCES * CONTEXT * KV_HEADS * HEAD_SIZE * DTYPE.itemsize
    rate = round(kv_bytes / median(seconds["paged"]) / 1e9, 2)
    rows = [
        row("kernels", "decode_gigabytes_per_second", rate, "GB/s", terms={"quire": terms_of(DTYPE, _DECODING)}),
        of_the_floor(seconds),
        over("decode_over_gather_and_sdpa", seconds, "gathered", "torch", terms_of(DTYPE, _DECODING)),
        over("decode_over_contiguous_sdpa", seconds, "contiguous", "torch", terms_of(DTYPE, _DECODING)),
        over("random_over_identity_table", seconds, "identity", "identity table", terms_of(DTYPE, _DECODING)),
    ]
    prompts = _prompts(kernels)
    for (length, dtype), times in prompts.items():
        metric = f"prompt_{length}_{dtype_name(dtype)}_over_contiguous_sdpa"
        rows.append(over(metric, times, "contiguous", "torch", terms_of(dtype, f"{length} tokens")))
    named = {f"{length}_{dtype_name(dtype)}": times for (length, dtype), times in prompts.items()}
    sizes: dict[str, Any] = {"kv_bytes": kv_bytes, "layers": LAYERS}
    repetitions = min(REPETITIONS, PROMPT_REPETITIONS)
    publish("kernels", rows, repetitions, code=CODE, prompts=named, seconds=seconds, **sizes)


def take_turns(ways: Ways, rounds: Iterable[int]) -> Seconds:
    """Run all ways in each round, in the turns of the round; return the seconds of each. Round 0 warms up."""
    names = list(ways)
    seconds: Seconds = {name: [] for name in names}
    with torch.inference_mode():
        for number in rounds:
            for name in in_turn(names, number):
                begun = perf_counter()
                ways[name]()
                if number:
                    seconds[name].append(perf_counter() - begun)
    return seconds


def terms_of(dtype: torch.dtype, work: str) -> Terms:
    """Return the terms of attention: no weights, query and cache of one type, torch's number of threads."""
    name = dtype_name(dtype)
    return Terms(activations=name, kv_cache=name, threads=torch.get_num_threads(), work=work)


def over(metric: str, seconds: Mapping[str, Sequence[float]], way: str, peer: str, terms: Terms) -> Row:
    """Return the row of our speed over another way's, which has the same terms: the median over repetitions."""
    ratio = round(median(their / our for their, our in zip(seconds[way], seconds["paged"], strict=True)), 3)
    null = null_interval(seconds["paged"], seconds["again"])
    return row("kernels", metric, ratio, "ratio", peer, terms={"quire": terms, way: terms}, null=null)


def of_the_floor(seconds: Mapping[str, Sequence[float]]) -> Row:
    """Return the row that compares our speed with the fastest read."""
    share = round(min(seconds["floor"]) / median(seconds["paged"]), 3)
    terms, null = {"quire": terms_of(DTYPE, _DECODING)}, null_interval(seconds["paged"], seconds["again"])
    return row("kernels", "decode_of_the_floor", share, "ratio", "memory", terms=terms, null=null, limit=True)


def _ways(kernels: Kernels, query: torch.Tensor) -> Ways:
    threads = torch.get_num_threads()
    native = CpuBackend(kernels, GEOMETRY, BLOCK_SIZE, BLOCKS, DTYPE, threads=threads)
    native.cache.normal_()
    gathering = TorchBackend(GEOMETRY, BLOCK_SIZE, BLOCKS, DTYPE)
    gathering.cache.normal_()
    shape = (LAYERS, 2, SEQUENCES, KV_HEADS, CONTEXT, HEAD_SIZE)
    contiguous = torch.randn(shape, dtype=DTYPE)
    # The query heads of one KV head are rows of one matrix: K and V are read once.
    packed = query.view(SEQUENCES, KV_HEADS, GROUP, HEAD_SIZE)
    ordered = list(range(1, BLOCKS + 1))
    shuffled = random.Random(1).sample(ordered, BLOCKS)
    identity, scattered = (decoding_step(blocks, SEQUENCES, CONTEXT, BLOCK_SIZE) for blocks in (ordered, shuffled))
    layers = range(LAYERS)
    whole = native.cache.view(torch.uint8).flatten()[: native.cache.nbytes >> 20 << 20]
    attention = torch.nn.functional.scaled_dot_product_attention
    return {
        "floor": lambda: kernels.read(whole, threads),
        "paged": lambda: [native.attend(layer, query, scattered, SCORING) for layer in layers],
        "again": lambda: [native.attend(layer, query, scattered, SCORING) for layer in layers],
        "identity": lambda: [native.attend(layer, query, identity, SCORING) for layer in layers],
        "gathered": lambda: [gathering.attend(layer, query, scattered, SCORING) for layer in layers],
        "contiguous": lambda: [attention(packed, key, value, scale=SCORING.scaling) for key, value in contiguous],
    }


def _prompts(kernels: Kernels) -> dict[tuple[int, torch.dtype], Seconds]:
    """Return the seconds of attention to the ends of prompts, by length and type."""
    found: dict[tuple[int, torch.dtype], Seconds] = {}
    for length, dtype in [(length, dtype) for length in PROMPTS for dtype in (torch.bfloat16, torch.float32)]:
        ways = _prompt_ways(kernels, length, dtype)
        found[length, dtype] = take_turns(ways, repeated(PROMPT_REPETITIONS, f"{length} {dtype_name(dtype)}"))
    return found


def _prompt_ways(kernels: Kernels, length: int, dtype: torch.dtype) -> Ways:
    """Return the attention of the last tokens of a prompt, over blocks and over contiguous memory."""
    geometry, heads, size = CacheGeometry.uniform(1, KV_HEADS, HEAD_SIZE), KV_HEADS * GROUP, HEAD_SIZE
    blocks = blocks_for(length, BLOCK_SIZE)
    backend = CpuBackend(kernels, geometry, BLOCK_SIZE, blocks, dtype, threads=torch.get_num_threads())
    backend.cache.normal_()
    table = tuple(random.Random(1).sample(range(1, blocks + 1), blocks))
    batch = PagedBatch.of([Work(1, (0,) * CHUNK, length - CHUNK, table, True, Sampling())], BLOCK_SIZE, CPU)
    query = torch.randn(CHUNK, heads, size, dtype=dtype)
    rows = query.transpose(0, 1)[None].contiguous()
    # Each query head has its own contiguous K and V. Without a mask, half of the last tokens are as many pairs.
    key, value = torch.randn(2, 1, heads, length - CHUNK // 2, size, dtype=dtype)
    return {
        "paged": lambda: backend.attend(0, query, batch, SCORING),
        "again": lambda: backend.attend(0, query, batch, SCORING),
        "contiguous": lambda: torch.nn.functional.scaled_dot_product_attention(rows, key, value, scale=SCORING.scaling),
    }


def decoding_step(blocks: Sequence[int], sequences: int, context: int, block_size: int) -> PagedBatch:
    """Lay out one decoding step of sequences of equal length, with blocks in this order."""
    each = blocks_for(context, block_size)
    tables = [tuple(blocks[number * each : (number + 1) * each]) for number in range(sequences)]
    work = [Work(number, (0,), context - 1, table, True, Sampling()) for number, table in enumerate(tables)]
    return PagedBatch.of(work, block_size, CPU)


if __name__ == "__main__":
    main()
