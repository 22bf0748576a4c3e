"""Decode attention: uniform and ragged lengths, blocks at random and in order, beside torch's kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from bench.gpu_check import REPETITIONS
from bench.gpu_check.budgets import Deadline
from bench.gpu_check.cases import (
    BLOCK_SIZE,
    DTYPE,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    attending,
    batch_of,
    blocks_of,
    flex_backend,
    kv_bytes,
    queries,
    torchs_attention,
    triton_backend,
)
from bench.gpu_check.ceilings import reading
from bench.gpu_check.notes import Notes
from bench.gpu_check.timing import Run, Seconds, recorded, take_turns, times_as_fast

_FLEX_BLOCK_SIZE = 128


@dataclass(frozen=True)
class Uniform:
    """A batch of equal lengths. K and V of all layers exceed the caches of the device threefold; layers alternate.

    `name` is part of the names of its rows.
    """

    name: str
    batch: int
    context: int
    layers: int


@dataclass(frozen=True)
class DecodeSizes:
    """The batches; `peers` is the one that torch's kernels run too."""

    peers: Uniform
    others: Sequence[Uniform]
    ragged: Sequence[int]
    ragged_layers: int
    short: Sequence[tuple[int, int]]  # sequences, and tokens of each, as in Figure 18a of PagedAttention
    short_layers: int
    repetitions: int


FULL = DecodeSizes(
    peers=Uniform("decode", 256, 1024, 2),
    others=(Uniform("decode_b32_c1024", 32, 1024, 16), Uniform("decode_b32_c8192", 32, 8192, 2)),
    ragged=(32768, *(16384,) * 2, *(8192,) * 4, *(4096,) * 8, *(2048,) * 16, *(1024,) * 32, *(512,) * 64),
    ragged_layers=2,
    short=tuple((batch, context) for batch in (8, 32) for context in (64, 128, 256)),
    short_layers=32,
    repetitions=REPETITIONS,
)
SMALL = DecodeSizes(
    peers=Uniform("decode", 2, 40, 1),
    others=(Uniform("decode_b32_c1024", 2, 20, 1), Uniform("decode_b32_c8192", 1, 40, 1)),
    ragged=(60, 20, 3),
    ragged_layers=1,
    short=((2, 32),),
    short_layers=1,
    repetitions=1,
)


def measure(sizes: DecodeSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Measure batch after batch; FlexAttention comes last, because its compilation takes longest."""
    attention(sizes, device, notes)
    if not deadline.passed():
        with notes.kept("decode, FlexAttention"):
            _beside_flex(sizes.peers, sizes.repetitions, device, notes)


def attention(sizes: DecodeSizes, device: torch.device, notes: Notes) -> None:
    """Measure our kernels, and torch's where the batch is uniform."""
    with notes.kept("decode, uniform"):
        _beside_torch(sizes.peers, sizes.repetitions, device, notes)
    for case in sizes.others:
        with notes.kept(case.name):
            lengths = (case.context,) * case.batch
            _of_the_floor(case.name, lengths, case.layers, sizes.repetitions, device, notes)
    with notes.kept("decode, ragged"):
        _of_the_floor("ragged_decode", sizes.ragged, sizes.ragged_layers, sizes.repetitions, device, notes)
    for batch, context in sizes.short:
        with notes.kept(f"decode, {batch} sequences of {context} tokens"):
            _short(batch, context, sizes, device, notes)


def _beside_torch(case: Uniform, repetitions: int, device: torch.device, notes: Notes) -> None:
    """Measure blocks at random and in order, and torch's attention on contiguous memory."""
    lengths = (case.context,) * case.batch
    backend = triton_backend(blocks_of(lengths), case.layers, device)
    query = queries(case.batch, device)
    runs = {
        "floor": recorded(reading(backend.cache), device),
        "paged": recorded(attending(backend, query, batch_of(lengths, backend.cache), case.layers), device),
        "identity": recorded(
            attending(backend, query, batch_of(lengths, backend.cache, mixed=False), case.layers), device
        ),
    }
    with notes.kept("sdpa"):
        runs |= _contiguous(query, case, device)
    seconds = take_turns(runs, repetitions, device, case.name)
    notes.raw(case.name, seconds)
    bytes_read = kv_bytes(lengths) * case.layers
    _note_bandwidth(notes, case.name, seconds, bytes_read, backend.cache.nbytes)
    notes.row("decode_over_contiguous_flash_sdpa", times_as_fast(seconds, "paged", "flash"), "ratio", "torch")
    notes.row("decode_over_contiguous_cudnn_sdpa", times_as_fast(seconds, "paged", "cudnn"), "ratio", "torch")
    notes.row("random_over_identity_table", times_as_fast(seconds, "paged", "identity"), "ratio", "identity table")


def _of_the_floor(
    name: str, lengths: Sequence[int], layers: int, repetitions: int, device: torch.device, notes: Notes
) -> None:
    """Measure a batch, beside reading as much memory as its cache has."""
    backend = triton_backend(blocks_of(lengths), layers, device)
    query = queries(len(lengths), device)
    runs = {
        "floor": recorded(reading(backend.cache), device),
        "paged": recorded(attending(backend, query, batch_of(lengths, backend.cache), layers), device),
    }
    seconds = take_turns(runs, repetitions, device, name)
    notes.raw(name, seconds)
    _note_bandwidth(notes, name, seconds, kv_bytes(lengths) * layers, backend.cache.nbytes)


def _note_bandwidth(notes: Notes, name: str, seconds: Seconds, bytes_read: int, floor_bytes: int) -> None:
    notes.row(f"{name}_bandwidth", round(bytes_read / median(seconds["paged"]) / 1e9, 1), "GB/s")
    share = share_of_the_floor(seconds, bytes_read, floor_bytes)
    notes.row(f"{name}_of_the_read_bandwidth", share, "ratio", "memory")


def _short(batch: int, context: int, sizes: DecodeSizes, device: torch.device, notes: Notes) -> None:
    """Decode short contexts: blocks at random, and a block of the context's length for each sequence."""
    query, lengths, layers = queries(batch, device), (context,) * batch, sizes.short_layers
    runs = {}
    for name, block_size in (("paged", BLOCK_SIZE), ("one_block", context)):
        backend = triton_backend(blocks_of(lengths, block_size), layers, device, block_size)
        step = batch_of(lengths, backend.cache, block_size=block_size, mixed=name == "paged")
        runs[name] = recorded(attending(backend, query, step, layers), device)
    seconds = take_turns(runs, sizes.repetitions, device, f"{batch} sequences of {context} tokens")
    notes.raw(f"short_b{batch}_c{context}", seconds)
    speed = times_as_fast(seconds, "paged", "one_block")
    notes.row(f"decode_b{batch}_c{context}_over_one_block", speed, "ratio", "one block for each sequence")


def _beside_flex(case: Uniform, repetitions: int, device: torch.device, notes: Notes) -> None:
    lengths = (case.context,) * case.batch
    query = queries(case.batch, device)
    ours = triton_backend(blocks_of(lengths), case.layers, device)
    flex = flex_backend(blocks_of(lengths, _FLEX_BLOCK_SIZE), case.layers, device, _FLEX_BLOCK_SIZE)
    theirs = attending(flex, query, batch_of(lengths, flex.cache, block_size=_FLEX_BLOCK_SIZE), case.layers)
    theirs()
    runs = {
        "paged": recorded(attending(ours, query, batch_of(lengths, ours.cache), case.layers), device),
        "flex": _recorded_if_possible(theirs, device),
    }
    seconds = take_turns(runs, repetitions, device, "decode beside FlexAttention")
    notes.raw("flex", seconds)
    notes.row("decode_over_flex_attention", times_as_fast(seconds, "paged", "flex"), "ratio", "FlexAttention")


def _recorded_if_possible(run: Run, device: torch.device) -> Run:
    """Record a compiled graph; the tape that takes the place of a recorder on a CPU cannot."""
    return run if device.type == "cpu" else recorded(run, device)


def _contiguous(query: torch.Tensor, case: Uniform, device: torch.device) -> dict[str, Run]:
    """Return torch's attention on contiguous K and V."""
    shape = (case.layers, case.batch, KV_HEADS, case.context, HEAD_SIZE)
    key, value = (torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2))
    found = torchs_attention(query.view(case.batch, HEADS, 1, HEAD_SIZE), key, value, causal=False)
    return {name: recorded(run, device) for name, run in found.items()}


def share_of_the_floor(seconds: Seconds, bytes_read: int, floor_bytes: int) -> float:
    """Return attention's bandwidth over the read bandwidth of the same repetition: the median."""
    pairs = zip(seconds["paged"], seconds["floor"], strict=True)
    return round(median((bytes_read / ours) / (floor_bytes / floor) for ours, floor in pairs), 3)
