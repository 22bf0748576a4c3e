"""Models whose weights stay packed: as close to the dequantized weights as rows of 8 bits can be."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.llama_shape import LlamaShape
from engine.model.loading import load_model
from engine.native import matrix_packer
from engine.native.cpu_backend import CpuBackend
from engine.native.decoder import NativeDecoder
from engine.native.formats import quantize
from engine.native.formats.coded import ALL
from engine.native.formats.grouped import GroupedWeights
from engine.native.grouped_strips import pack_strips, strips_size
from engine.native.kernels import Kernels
from engine.native.llama_weights import EMBEDDING, HEAD, FileWeights
from engine.run.runner import ModelRunner
from tests.engine import native_kernels
from tests.engine.decoding import logits, prompt
from tests.engine.families import FAMILIES, GROUPED, Checkpoint, Family
from tests.engine.grouped_weights import order_within_groups, ordered, rows_of

BLOCK = 16
TIED = Family("llama", GROUPED | {"tie_word_embeddings": True})
PLACES = tuple(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down"))


Change = Callable[[str, GroupedWeights], GroupedWeights]


class MixedWeights:
    """Matrices of 4 and of 8 bits, as files mix them: also in what is multiplied at once. `packed`: not dequantized."""

    def __init__(self, folder: Path, *, packed: bool, change: Change = lambda _name, weights: weights) -> None:
        """`change` is made to each quantized matrix."""
        self._files = FileWeights(folder)
        self._packed = packed
        self._change = change
        self.largest = 0
        """Weights of the largest piece that was read."""

    def shape(self, name: str) -> Sequence[int] | None:
        return self._files.shape(name)

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor | None:
        found = self._quantized(name)
        if found is not None:
            return torch.from_numpy(found.dense())[rows]
        plain = self._files.tensor(name, rows)
        # Norms of random models are ones, which hide an order.
        return plain * torch.linspace(0.5, 1.5, len(plain)) if plain is not None and "norm" in name else plain

    def grouped(self, name: str, rows: slice = ALL) -> GroupedWeights | None:
        found = self._quantized(name) if self._packed else None
        if found is None:
            return None
        piece = rows_of(found, rows)
        self.largest = max(self.largest, piece.codes.size)
        return piece

    def tied(self) -> bool:
        return self._files.tied()

    def _quantized(self, name: str) -> GroupedWeights | None:
        found = self._files.tensor(name)
        if found is None or not (name in (EMBEDDING, HEAD) or any(place in name for place in PLACES)):
            return None
        if found.ndim < 2:  # a bias
            return None
        method = quantize.int8 if name == HEAD or "v_proj" in name or "up_proj" in name else quantize.int4
        return self._change(name, method(name, found.float().numpy()))


@pytest.fixture(scope="module", params=["avx512-bf16", "avx2"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels.kernels(request.param)


def runner_of(kernels: Kernels, folder: Path, weights: MixedWeights) -> ModelRunner:
    loaded = load_model(folder, torch.bfloat16, torch.device("cpu"))
    backend = CpuBackend(kernels, loaded.geometry, BLOCK, 100, torch.bfloat16, threads=2)
    shape = LlamaShape.of(loaded.model)
    decoder = NativeDecoder(kernels, shape, weights, backend.layer_caches, loaded.context_tokens, 2)
    return ModelRunner(loaded, backend, BLOCK, decoder=decoder)


def logits_of_prompts(runner: ModelRunner, count: int) -> torch.Tensor:
    parts = [(prompt(30, seed), 0, (2 * seed + 1, 2 * seed + 2)) for seed in range(count)]
    return torch.stack(list(logits(runner, *parts)))


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the mean distance of logits in units of their spread."""
    return float(((found - expected).square().mean(dim=1).sqrt() / expected.std(dim=1)).mean())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3 with windows"])
def test_logits_are_close_to_those_of_the_dequantized_weights(
    kernels: Kernels, checkpoint: Checkpoint, kind: str
) -> None:
    folder = checkpoint(FAMILIES[kind])
    packed, dense = (runner_of(kernels, folder, MixedWeights(folder, packed=one)) for one in (True, False))
    parts = [(prompt(count, count), 0, table) for count, table in ((70, (7, 3, 9, 1, 12)), (21, (2, 8)), (1, (5,)))]
    found, expected = (torch.stack(list(logits(one, *parts))) for one in (packed, dense))
    assert apart(found, expected) < 0.1  # with weights in wrong places it is about 1


@pytest.mark.parametrize("count", [3, 40])
def test_a_sequence_gets_the_same_logits_alone_and_in_a_batch(
    kernels: Kernels, checkpoint: Checkpoint, count: int
) -> None:
    """Forty prompts are computed in bands, three by all threads together."""
    folder = checkpoint(FAMILIES["llama"])
    runner = runner_of(kernels, folder, MixedWeights(folder, packed=True, change=mixed_up))
    parts = [(prompt(30, seed), 0, (2 * seed + 1, 2 * seed + 2)) for seed in range(count)]
    together = logits(runner, *parts)
    for number in (0, count // 2, count - 1):
        assert torch.equal(logits(runner, parts[number])[0], together[number])


def place_of(name: str) -> int:
    """Return a number that matrices share which multiply the same rows."""
    places = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",), (EMBEDDING, HEAD))
    layer = int(name.split(".")[2]) if ".layers." in name else 99
    return 10 * layer + next(number for number, parts in enumerate(places) if any(one in name for one in parts))


def within_groups(name: str, weights: GroupedWeights) -> GroupedWeights:
    return ordered(weights, order_within_groups(weights.shape[1], place_of(name)))


def mixed_up(name: str, weights: GroupedWeights) -> GroupedWeights:
    """Return a matrix with sorted columns, as act-order has them: groups have other columns."""
    inputs = weights.shape[1]
    order = np.random.default_rng(place_of(name)).permutation(inputs)
    sorted_values = weights.dense()[:, order]
    method = quantize.int8 if weights.bits == 8 else quantize.int4
    return method(name, sorted_values)._replace(order=order)


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "tied", "qwen3 with windows"])
def test_columns_in_another_order_within_their_groups_give_the_same_logits(
    kernels: Kernels, checkpoint: Checkpoint, kind: str, count: int
) -> None:
    """Rows of 8 bits have the same codes then, and the same sums of each group."""
    folder = checkpoint(TIED if kind == "tied" else FAMILIES[kind])
    plain = runner_of(kernels, folder, MixedWeights(folder, packed=True))
    other = runner_of(kernels, folder, MixedWeights(folder, packed=True, change=within_groups))
    assert torch.equal(logits_of_prompts(plain, count), logits_of_prompts(other, count))


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_columns_in_any_order_give_logits_close_to_those_of_the_dequantized_weights(
    kernels: Kernels, checkpoint: Checkpoint, kind: str, count: int
) -> None:
    folder = checkpoint(FAMILIES[kind])
    packed, dense = (
        runner_of(kernels, folder, MixedWeights(folder, packed=one, change=mixed_up)) for one in (True, False)
    )
    assert apart(logits_of_prompts(packed, count), logits_of_prompts(dense, count)) < 0.2


@pytest.mark.parametrize("packed", [True, False])
def test_matrices_that_are_packed_in_pieces_give_the_same_logits(
    kernels: Kernels, checkpoint: Checkpoint, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(FAMILIES["llama"])
    weights = [MixedWeights(folder, packed=packed, change=mixed_up) for _ in range(2)]
    whole = logits_of_prompts(runner_of(kernels, folder, weights[0]), 3)
    monkeypatch.setattr(matrix_packer, "_PIECE", 2048)
    assert torch.equal(logits_of_prompts(runner_of(kernels, folder, weights[1]), 3), whole)
    assert weights[0].largest == 0 if not packed else weights[0].largest > 2048 >= weights[1].largest > 0


def test_rows_that_are_not_finite_give_logits_that_are_not_finite(kernels: Kernels) -> None:
    """Else a broken model would answer as if nothing had happened."""
    weights = quantize.int8("w", np.ones((16, 64), dtype=np.float32))
    memory = kernels.zeros([strips_size(kernels, weights)], torch.uint8)
    strips = pack_strips(kernels, weights, memory, 1)
    for bad in (float("nan"), float("inf")):
        rows = torch.ones(3, 64)
        rows[1, 40] = bad
        found = kernels.multiply_grouped(strips, 16, rows, 1)
        assert not found[1].isfinite().any()
        assert found[0].isfinite().all()
        assert found[2].isfinite().all()
