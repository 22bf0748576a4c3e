"""Every kernel against float32 at the shapes of the benchmarks, and recorded steps against eager ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench.gpu_check import references
from bench.gpu_check.budgets import Deadline
from bench.gpu_check.cases import (
    BLOCK_SIZE,
    DTYPE,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    SCORING,
    SHAPE,
    batch_of,
    blocks_of,
    laid_out,
    queries,
    triton_backend,
)
from bench.gpu_check.given_logits import WAYS, GivenLogits, known_tokens, logits_of
from bench.gpu_check.llama_engine import LLAMA_3_8B, TINY, Decoders, decoders, device_sampler, piecewise, random_model
from bench.gpu_check.notes import Notes
from bench.gpu_check.references import worst_row
from blocks import Copy, blocks_for
from engine.attention.backend import Direction, PagedBatch, Scoring
from engine.attention.cache import LayerShape
from engine.gpu.triton_backend import TritonBackend
from engine.model.decoder import Decoder
from engine.run.samplers import TorchSampler
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from engine.triton_kernels.gated import silu_gated
from engine.triton_kernels.norm import add_and_norm

# bfloat16 has 8 significant bits: rounding a result costs 0.2 %, and softmax weights are rounded before their product.
_MOST_ERROR = 0.02
# Logits of the same kernels in a graph; torch may choose other matrix products while it records.
_MOST_LOGIT_ERROR = 0.05
# Near ties differ where sums are rounded in another order.
_MOST_OTHER_TOKENS = 0.02


@dataclass(frozen=True)
class ExactnessSizes:
    """Lengths of the decoded batches, fed tokens and lengths of prompts, rows of the other kernels, and a model.

    Of the model, decoding steps of `batches` are recorded, and steps with prompts of `pieces` tokens; `mixed` are the
    fed tokens of the latter, by sequence.
    """

    uniform: Sequence[int]
    ragged: Sequence[int]
    fed: Sequence[int]
    prompts: Sequence[int]
    rows: int
    width: int
    sampled: tuple[int, int]  # rows and vocabulary
    config: dict[str, Any]
    batches: tuple[int, ...]
    context: int
    pieces: tuple[int, ...]
    mixed: tuple[tuple[int, ...], ...]


FULL = ExactnessSizes(
    uniform=(1024,) * 256,
    ragged=(32768, *(4096,) * 8, *(1000,) * 32, *(513,) * 32, 17, 1),
    fed=(4096, 512, 1, 7),
    prompts=(4096, 8192, 5000, 4103),
    rows=256,
    width=4096,
    sampled=(32, 128256),
    config=LLAMA_3_8B | {"num_hidden_layers": 2},
    batches=(1, 32, 256),
    context=1024,
    pieces=(16, 64, 256),
    mixed=((13,), (33, 7, *(1,) * 20), (200, 56), (250,)),
)
SMALL = ExactnessSizes((20, 20), (40, 17, 1), (10, 1), (25, 9), 3, 96, (4, 300), TINY, (1, 2), 20, (4,), ((2, 1),))


def measure(sizes: ExactnessSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Write the largest error of each kernel; one beyond its bound is a failure."""
    checks: dict[str, Callable[[], float]] = {
        "decode": partial(_attention_error, sizes.uniform, (), device),
        "ragged_decode": partial(_attention_error, sizes.ragged, (), device),
        "prefill": partial(_attention_error, sizes.prompts, sizes.fed, device),
        "sinks": partial(_sinks_error, sizes, device),
        "k192_v128": partial(_sizes_error, sizes, device),
        "write": partial(_write_error, sizes.rows, device),
        "copy": partial(_copy_error, sizes.rows, device),
        "swap": partial(swap_error, sizes.rows, device),
        "write_rotated": partial(_rotation_error, sizes.rows, device),
        "add_and_norm": partial(_norm_error, sizes.rows, sizes.width, device),
        "silu_gated": partial(_gate_error, sizes.rows, sizes.width, device),
    }
    for name, check in checks.items():
        with notes.kept(f"exactness of {name}"):
            _note(notes, f"{name}_error", check(), _MOST_ERROR, "float32")
    with notes.kept("recorded steps"):
        recorded_steps(sizes, device, notes)
    if not deadline.passed():
        with notes.kept("exactness of sampling"):
            sampling(sizes, device, notes)


def _note(notes: Notes, metric: str, value: float, bound: float, peer: str) -> None:
    notes.row(metric, round(value, 5), "ratio", peer)
    assert value <= bound, f"{metric} is {value:.3g}, which must be at most {bound}"


def _attention_error(
    lengths: Sequence[int],
    fed: Sequence[int],
    device: torch.device,
    shape: LayerShape = SHAPE,
    scoring: Scoring = SCORING,
) -> float:
    backend = triton_backend(blocks_of(lengths), 1, device, shape=shape)
    batch = batch_of(lengths, backend.cache, fed=fed)
    query = queries(sum(batch.fed), device, shape.key_size)
    found = backend.attend(0, query, batch, scoring)
    return worst_row(found, references.attention(query, backend, 0, batch, scoring))


def _sinks_error(sizes: ExactnessSizes, device: torch.device) -> float:
    """Return the error of prompts and decoding with sinks of about the weight of all keys, as in GPT-OSS."""
    sinks = torch.randn(HEADS, dtype=DTYPE, device=device) + math.log(max(sizes.prompts))
    return _attention_error(sizes.prompts, sizes.fed, device, scoring=SCORING._replace(sinks=sinks))


def _sizes_error(sizes: ExactnessSizes, device: torch.device) -> float:
    """Return the error of prompts and decoding with K and V of different sizes, as in DeepSeek-V3."""
    return _attention_error(sizes.prompts, sizes.fed, device, LayerShape(KV_HEADS, 192, 128), Scoring(192**-0.5))


def _write_error(rows: int, device: torch.device) -> float:
    backend, batch = _one_token_each(rows, device)
    key, value = torch.randn(2, rows, KV_HEADS, HEAD_SIZE, dtype=DTYPE, device=device)
    expected = backend.cache.clone()
    blocks, offsets = batch.slots // BLOCK_SIZE, batch.slots % BLOCK_SIZE
    for part, written in zip(backend.layout.parts[1], (key, value), strict=True):
        part.of(expected)[blocks, :, offsets] = written
    backend.write(1, key, value, batch)
    return float(not torch.equal(backend.cache, expected))


def _copy_error(rows: int, device: torch.device) -> float:
    backend = triton_backend(2 * rows, 2, device)
    expected = backend.cache.clone()
    expected[rows + 1 :] = expected[1 : rows + 1].flip(0)
    backend.copy_blocks([Copy(rows - number, rows + 1 + number) for number in range(rows)])
    return float(not torch.equal(backend.cache, expected))


def swap_error(rows: int, device: torch.device) -> float:
    """Copy blocks to the host tier and back to other places; return 0 if they arrive as they were."""
    backend = triton_backend(2 * rows, 2, device, host_blocks=rows)
    expected = backend.cache[1 : rows + 1].flip(0)
    backend.swap([Copy(1 + number, 1 + number) for number in range(rows)], Direction.DEVICE_TO_HOST)
    backend.swap([Copy(rows - number, rows + 1 + number) for number in range(rows)], Direction.HOST_TO_DEVICE)
    return float(not torch.equal(backend.cache[rows + 1 :], expected))


def _rotation_error(rows: int, device: torch.device) -> float:
    """Return the error of rotated Q and K; the cache must have V exactly."""
    backend, batch = _one_token_each(rows, device)
    projected = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_SIZE, dtype=DTYPE, device=device)
    angles = torch.rand(rows, HEAD_SIZE // 2, device=device) * 6
    rotations = torch.cat((angles.cos(), angles.sin()), dim=-1)
    query = torch.full((rows, HEADS, HEAD_SIZE), float("nan"), dtype=DTYPE, device=device)
    positions = torch.arange(rows, device=device)
    backend.write_rotated(1, projected, positions, rotations, query, batch.slots)
    heads = projected.view(rows, -1, HEAD_SIZE)
    expected = references.rotated(heads[:, : HEADS + KV_HEADS], rotations)
    blocks, offsets = batch.slots // BLOCK_SIZE, batch.slots % BLOCK_SIZE
    key, value = (part[blocks, :, offsets] for part in (backend.keys(1), backend.values(1)))
    assert torch.equal(value, heads[:, HEADS + KV_HEADS :]), "V differs"
    return worst_row(torch.cat((query, key), dim=1), expected)


def _norm_error(rows: int, width: int, device: torch.device) -> float:
    residual, computed = torch.randn(2, rows, width, dtype=DTYPE, device=device)
    weight = torch.randn(width, dtype=DTYPE, device=device)
    expected = references.normed(residual + computed, weight, 1e-5)
    return worst_row(add_and_norm(residual, computed, weight, 1e-5), expected)


def _gate_error(rows: int, width: int, device: torch.device) -> float:
    gates = torch.randn(rows, 2 * width, dtype=DTYPE, device=device)
    return worst_row(silu_gated(gates), references.gated(gates))


def _one_token_each(rows: int, device: torch.device) -> tuple[TritonBackend, PagedBatch]:
    """Return a backend with two layers, and a step in which each sequence feeds its last token."""
    lengths = [1 + 5 * row % 40 for row in range(rows)]
    backend = triton_backend(blocks_of(lengths), 2, device)
    return backend, batch_of(lengths, backend.cache)


def recorded_steps(sizes: ExactnessSizes, device: torch.device, notes: Notes) -> None:
    """Compare the logits of a step, recorded and eager: decoding for each batch size, then prompts."""
    loaded = random_model(sizes.config, device)
    made = decoders(loaded, pool_blocks(sizes), sizes.batches, device)
    with notes.kept("recorded decoding"):
        for batch in sizes.batches:
            made.backend.cache.normal_()
            apart = _logit_error(made, made.recorded, (1,) * batch, sizes.context)
            _note(notes, f"recorded_logits_b{batch}_error", apart, _MOST_LOGIT_ERROR, "eager")
    with notes.kept("recorded prompts"):
        pieces = piecewise(made, sizes.pieces, device)
        apart = 0.0
        for fed in sizes.mixed:
            made.backend.cache.normal_()
            apart = max(apart, _logit_error(made, pieces, fed, sizes.context))
        _note(notes, "recorded_prompts_error", apart, _MOST_LOGIT_ERROR, "eager")


def pool_blocks(sizes: ExactnessSizes) -> int:
    """Return the blocks of a pool that holds the sequences of each recorded step."""
    sequences = max(*sizes.batches, *map(len, sizes.mixed))
    return sequences * blocks_for(sizes.context, BLOCK_SIZE)


def _logit_error(made: Decoders, recorded: Decoder, fed: Sequence[int], context: int) -> float:
    """Compare the logits behind the last tokens of sequences of length `context`, each of which feeds `fed`."""
    device = made.backend.cache.device
    width = blocks_for(context, BLOCK_SIZE)
    tables = [tuple(range(row * width + 1, (row + 1) * width + 1)) for row in range(len(fed))]
    work = [
        Work(row, (row,) * count, context - count, table, True, Sampling())
        for row, (count, table) in enumerate(zip(fed, tables, strict=True))
    ]
    token_ids = torch.tensor([token for one in work for token in one.token_ids], device=device)
    positions = torch.cat([torch.arange(one.start, one.end, device=device) for one in work])
    places = torch.tensor(fed, device=device).cumsum(0) - 1
    # A batch each, because a backend keeps the work list of a batch.
    expected, found = (
        decoder.logits(token_ids, positions, places, laid_out(work, made.backend.cache))
        for decoder in (made.eager, recorded)
    )
    return worst_row(found, expected.float())


def sampling(sizes: ExactnessSizes, device: torch.device, notes: Notes) -> None:
    """Write the share of sampled tokens that differ from the CPU's."""
    _note(notes, "sampled_tokens_differing", _other_tokens(sizes, device), _MOST_OTHER_TOKENS, "the CPU")


def _other_tokens(sizes: ExactnessSizes, device: torch.device) -> float:
    """Return the share of tokens of the GPU's kernels that torch samples otherwise from the same logits on the CPU."""
    logits = logits_of(*sizes.sampled, device)
    known = known_tokens(sizes.sampled[0], 64, sizes.sampled[1])
    ours = GivenLogits(logits, device_sampler(*sizes.sampled, logits.dtype, device))
    theirs = GivenLogits(logits.cpu(), TorchSampler())
    pairs = [
        pair for way in WAYS.values() for pair in zip(ours.sample(way, known), theirs.sample(way, known), strict=True)
    ]
    return sum(one != other for one, other in pairs) / len(pairs)
