"""The attention kernels with the heads of Llama-3-8B, compared with memory bandwidth and torch's kernels."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu_check import REPETITIONS
from bench.gpu_check.ceilings import reading
from bench.gpu_check.notes import Notes
from bench.gpu_check.timing import Run, Seconds, recorded, take_turns, times_as_fast
from blocks import Copy, blocks_for
from engine.attention.backend import AttentionBackend, Direction, PagedBatch, Scoring
from engine.attention.cache import CacheGeometry
from engine.attention.flex_backend import FlexBackend
from engine.gpu.triton_backend import TritonBackend
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work

DTYPE = torch.bfloat16
KV_HEADS, GROUP, HEAD_SIZE = 8, 4, 128
SCORING = Scoring(HEAD_SIZE**-0.5)
BLOCK_SIZE, FLEX_BLOCK_SIZE = 16, 128


@dataclass(frozen=True)
class KernelSizes:
    """Sizes of the measurements. K and V of a layer exceed all caches of the device, and layers alternate."""

    lengths: Sequence[int]
    ragged: Sequence[int]
    prompt: int
    layers: int
    repetitions: int
    copied_blocks: int
    short: Sequence[tuple[int, int]]  # sequences, and tokens of each, as in Figure 18a of PagedAttention
    short_layers: int


FULL = KernelSizes(
    lengths=(1024,) * 256,
    ragged=(32768, *(16384,) * 2, *(8192,) * 4, *(4096,) * 8, *(2048,) * 16, *(1024,) * 32, *(512,) * 64),
    prompt=8192,
    layers=2,
    repetitions=REPETITIONS,
    copied_blocks=512,
    short=tuple((batch, context) for batch in (8, 32) for context in (64, 128, 256)),
    short_layers=32,
)
SMALL = KernelSizes(
    lengths=(40, 40),
    ragged=(60, 20, 3),
    prompt=20,
    layers=1,
    repetitions=1,
    copied_blocks=4,
    short=((2, 32),),
    short_layers=1,
)


def part(name: str, device: torch.device, *, small: bool) -> Callable[[Notes], None]:
    """Return the measurement of one part."""
    found = {"uniform": _uniform, "ragged": _ragged, "prefill": _prefill, "copies": _copies, "short": _short}[name]
    return partial(found, SMALL if small else FULL, device)


def _uniform(sizes: KernelSizes, device: torch.device, notes: Notes) -> None:
    """Decode with equal lengths: ours at random and in order, torch on contiguous memory, FlexAttention on blocks."""
    lengths = sizes.lengths
    backend = _backend(TritonBackend, sum(blocks_for(one, BLOCK_SIZE) for one in lengths), BLOCK_SIZE, sizes, device)
    query = torch.randn(len(lengths), KV_HEADS * GROUP, HEAD_SIZE, dtype=DTYPE, device=device)
    runs = {
        "floor": recorded(reading(backend.cache), device),
        "paged": recorded(_decoding(backend, query, _batch(lengths, BLOCK_SIZE, device), sizes), device),
        "identity": recorded(
            _decoding(backend, query, _batch(lengths, BLOCK_SIZE, device, mixed=False), sizes), device
        ),
    }
    with notes.kept("sdpa"):
        runs |= _contiguous(query, lengths, sizes, device)
    with notes.kept("flex"):
        blocks = sum(blocks_for(one, FLEX_BLOCK_SIZE) for one in lengths)
        flex = _backend(FlexBackend, blocks, FLEX_BLOCK_SIZE, sizes, device)
        run = _decoding(flex, query, _batch(lengths, FLEX_BLOCK_SIZE, device), sizes)
        run()
        runs["flex"] = run if device.type == "cpu" else recorded(run, device)  # a tape cannot record a compiled graph
    seconds = take_turns(runs, sizes.repetitions, device, "decode")
    notes.raw("uniform", seconds)
    bytes_read = _kv_bytes(lengths) * sizes.layers
    share = _share_of_the_floor(seconds, bytes_read, backend.cache.nbytes)
    ours = median(seconds["paged"])
    notes.row("read_bandwidth", round(backend.cache.nbytes / median(seconds["floor"]) / 1e9, 1), "GB/s")
    notes.row("decode_bandwidth", round(bytes_read / ours / 1e9, 1), "GB/s")
    notes.row("decode_of_the_read_bandwidth", share, "ratio", "memory")
    notes.row("decode_over_contiguous_flash_sdpa", times_as_fast(seconds, "paged", "flash"), "ratio", "torch")
    notes.row("decode_over_contiguous_cudnn_sdpa", times_as_fast(seconds, "paged", "cudnn"), "ratio", "torch")
    notes.row("decode_over_flex_attention", times_as_fast(seconds, "paged", "flex"), "ratio", "FlexAttention")
    notes.row("random_over_identity_table", times_as_fast(seconds, "paged", "identity"), "ratio", "identity table")


def _short(sizes: KernelSizes, device: torch.device, notes: Notes) -> None:
    """Decode short contexts: blocks at random, and a block of the context's length for each sequence."""
    sizes = replace(sizes, layers=sizes.short_layers)
    for batch, context in sizes.short:
        query = torch.randn(batch, KV_HEADS * GROUP, HEAD_SIZE, dtype=DTYPE, device=device)
        runs = {}
        for name, block_size in (("paged", BLOCK_SIZE), ("one_block", context)):
            backend = _backend(TritonBackend, batch * blocks_for(context, block_size), block_size, sizes, device)
            step = _batch((context,) * batch, block_size, device, mixed=name == "paged")
            runs[name] = recorded(_decoding(backend, query, step, sizes), device)
        seconds = take_turns(runs, sizes.repetitions, device, f"{batch} sequences of {context} tokens")
        notes.raw(f"short_b{batch}_c{context}", seconds)
        speed = times_as_fast(seconds, "paged", "one_block")
        notes.row(f"decode_b{batch}_c{context}_over_one_block", speed, "ratio", "one block for each sequence")


def _ragged(sizes: KernelSizes, device: torch.device, notes: Notes) -> None:
    lengths = sizes.ragged
    backend = _backend(TritonBackend, sum(blocks_for(one, BLOCK_SIZE) for one in lengths), BLOCK_SIZE, sizes, device)
    query = torch.randn(len(lengths), KV_HEADS * GROUP, HEAD_SIZE, dtype=DTYPE, device=device)
    runs = {
        "floor": recorded(reading(backend.cache), device),
        "paged": recorded(_decoding(backend, query, _batch(lengths, BLOCK_SIZE, device), sizes), device),
    }
    seconds = take_turns(runs, sizes.repetitions, device, "ragged decode")
    notes.raw("ragged", seconds)
    share = _share_of_the_floor(seconds, _kv_bytes(lengths) * sizes.layers, backend.cache.nbytes)
    notes.row("ragged_decode_of_the_read_bandwidth", share, "ratio", "memory")


def _prefill(sizes: KernelSizes, device: torch.device, notes: Notes) -> None:
    """A whole prompt, and its second half with the first half cached."""
    tokens = sizes.prompt
    backend = _backend(TritonBackend, blocks_for(tokens, BLOCK_SIZE), BLOCK_SIZE, sizes, device)
    query = torch.randn(tokens, KV_HEADS * GROUP, HEAD_SIZE, dtype=DTYPE, device=device)
    whole, half = (_batch((tokens,), BLOCK_SIZE, device, fed=fed) for fed in (tokens, tokens // 2))
    rear = query[tokens - tokens // 2 :]
    runs: dict[str, Run] = {
        "paged": lambda: [backend.attend(layer, query, whole, SCORING) for layer in range(sizes.layers)],
        "paged_onto_a_prefix": lambda: [backend.attend(layer, rear, half, SCORING) for layer in range(sizes.layers)],
    }
    packed = query.transpose(0, 1)[None]
    key, value = (
        torch.randn(sizes.layers, 1, KV_HEADS, tokens, HEAD_SIZE, dtype=DTYPE, device=device) for _ in range(2)
    )
    runs |= _torchs(packed, key, value, causal=True)
    seconds = take_turns(runs, sizes.repetitions, device, "prefill")
    notes.raw("prefill", seconds)
    operations = 2 * tokens * tokens * KV_HEADS * GROUP * HEAD_SIZE * sizes.layers
    notes.row("prefill_attention", round(operations / median(seconds["paged"]) / 1e12, 1), "TFLOP/s")
    notes.row("prefill_over_flash_sdpa", times_as_fast(seconds, "paged", "flash"), "ratio", "torch")
    notes.row("prefill_over_cudnn_sdpa", times_as_fast(seconds, "paged", "cudnn"), "ratio", "torch")


def _copies(sizes: KernelSizes, device: torch.device, notes: Notes) -> None:
    """Copies of blocks of 32 layers: in the cache, and to the host tier and back, compared with one large copy."""
    count = sizes.copied_blocks
    geometry = CacheGeometry(32 if device.type == "cuda" else 2, KV_HEADS, HEAD_SIZE)
    backend = TritonBackend(geometry, BLOCK_SIZE, 2 * count, DTYPE, device, count)
    host = backend.host_cache
    assert host is not None
    blocks = list(range(1, 2 * count + 1))
    random.Random(1).shuffle(blocks)
    sources, targets, hosts = blocks[:count], blocks[count:], list(range(1, count + 1))
    random.Random(2).shuffle(hosts)
    out = [Copy(*pair) for pair in zip(sources, hosts, strict=True)]
    back = [Copy(*pair) for pair in zip(hosts, targets, strict=True)]
    runs: dict[str, Run] = {
        "swap_out": lambda: backend.swap(out, Direction.DEVICE_TO_HOST),
        "large_out": lambda: host[1:].copy_(backend.cache[1 : count + 1], non_blocking=True),
        "swap_in": lambda: backend.swap(back, Direction.HOST_TO_DEVICE),
        "large_in": lambda: backend.cache[1 : count + 1].copy_(host[1:], non_blocking=True),
        "copy": lambda: backend.copy_blocks([Copy(*pair) for pair in zip(sources, targets, strict=True)]),
        "large": lambda: backend.cache[1 : count + 1].copy_(backend.cache[count + 1 :]),
    }
    seconds = take_turns(runs, sizes.repetitions, device, "copies")
    notes.raw("copies", seconds)
    notes.row("swap_out_over_one_large_copy", times_as_fast(seconds, "swap_out", "large_out"), "ratio", "torch")
    notes.row("swap_in_over_one_large_copy", times_as_fast(seconds, "swap_in", "large_in"), "ratio", "torch")
    notes.row("copy_over_one_large_copy", times_as_fast(seconds, "copy", "large"), "ratio", "torch")


def _contiguous(
    query: torch.Tensor, lengths: Sequence[int], sizes: KernelSizes, device: torch.device
) -> dict[str, Run]:
    """Return torch's attention on contiguous K and V of equal lengths."""
    shape = (sizes.layers, len(lengths), KV_HEADS, lengths[0], HEAD_SIZE)
    key, value = (torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2))
    packed = query.view(len(lengths), KV_HEADS * GROUP, 1, HEAD_SIZE)
    found = _torchs(packed, key, value, causal=False)
    return {name: recorded(run, device) for name, run in found.items()}


def _torchs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> dict[str, Run]:
    """Return the matching kernels of torch, in all layers."""
    flash = SDPBackend.FLASH_ATTENTION if query.device.type == "cuda" else SDPBackend.MATH
    found: dict[str, Run] = {}
    for name, kind in (("flash", flash), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        run = _sdpa(kind, query, key, value, causal=causal)
        try:
            run()
        except RuntimeError as refused:
            print(f"torch has no {name} attention for this: {refused}")
        else:
            found[name] = run
    return found


def _sdpa(kind: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> Run:
    def run() -> None:
        with sdpa_kernel(kind):
            for layer in range(len(key)):
                scaled_dot_product_attention(query, key[layer], value[layer], is_causal=causal, enable_gqa=True)

    return run


def _backend(
    kind: type[TritonBackend] | type[FlexBackend],
    blocks: int,
    block_size: int,
    sizes: KernelSizes,
    device: torch.device,
) -> TritonBackend | FlexBackend:
    backend = kind(CacheGeometry(sizes.layers, KV_HEADS, HEAD_SIZE), block_size, blocks, DTYPE, device)
    backend.cache.normal_()
    return backend


def _decoding(backend: AttentionBackend, query: torch.Tensor, batch: PagedBatch, sizes: KernelSizes) -> Run:
    """Return one step's attention in all layers. Ours plans its work each time, as in each step."""

    def run() -> None:
        step = replace(batch) if isinstance(backend, TritonBackend) else batch
        for layer in range(sizes.layers):
            backend.attend(layer, query, step, SCORING)

    return run


def _batch(
    lengths: Sequence[int], block_size: int, device: torch.device, *, fed: int = 1, mixed: bool = True
) -> PagedBatch:
    """Lay out a step of sequences with these lengths, with blocks in random order or in order."""
    counts = [blocks_for(length, block_size) for length in lengths]
    blocks = list(range(1, sum(counts) + 1))
    if mixed:
        random.Random(1).shuffle(blocks)
    work, begin = [], 0
    for number, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table = tuple(blocks[begin : begin + count])
        work.append(Work(number, (0,) * fed, length - fed, table, True, Sampling()))
        begin += count
    return PagedBatch.of(work, block_size, device)


def _kv_bytes(lengths: Sequence[int]) -> int:
    return 2 * sum(lengths) * KV_HEADS * HEAD_SIZE * DTYPE.itemsize


def _share_of_the_floor(seconds: Seconds, bytes_read: int, floor_bytes: int) -> float:
    """Return attention's bandwidth over the read bandwidth of the same repetition: the median."""
    pairs = zip(seconds["paged"], seconds["floor"], strict=True)
    return round(median((bytes_read / ours) / (floor_bytes / floor) for ours, floor in pairs), 3)
